"""Universally slimmable networks (US-Nets): any width between the smallest and the largest one.

Yu, Huang: "Universally Slimmable Networks and Improved Training Techniques", ICCV 2019, arXiv:1903.05134. Every step
has the largest width, the smallest and a few random ones (the sandwich rule); the largest learns from the labels, all
others from what it says (in-place distillation). The widths share all weights, batch normalisation too; the statistics
of each width that is used afterwards are calculated after training.
"""

from decomposable.methods.us_net.method import METHOD

__all__ = ["METHOD"]
