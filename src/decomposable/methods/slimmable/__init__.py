"""Slimmable networks: a few widths that share their weights and are trained together.

Yu, Yang, Xu, Yang, Huang: "Slimmable Neural Networks", ICLR 2019, arXiv:1812.08928. Every step has one pass for each
width, and the mean (or the sum) of all losses is what is learned. The widths differ too much in their activations to
share batch normalisation: each has γ, β and statistics of its own.
"""

from decomposable.methods.slimmable.method import METHOD

__all__ = ["METHOD"]
