"""Decomposable-Net: the full network and a low-rank network of random size together (`joint.py`)."""

from decomposable.methods.decomposable.method import METHOD

__all__ = ["METHOD"]
