"""Decomposable-Net with budgets, distillation and turns: better small networks than the paper's, for about plain steps.

A low-rank network of a random part of the MACs learns from the full network's outputs, and the two take turns
(`joint.py`; docs/training.md says what each of these is worth).
"""

from decomposable.methods.elastic.method import METHOD

__all__ = ["METHOD"]
