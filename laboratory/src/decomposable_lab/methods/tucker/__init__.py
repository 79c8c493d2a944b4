"""Decompose a trained network at ranks that variational Bayes chooses, then fine-tune it: one size, trained for itself.

Y.-D. Kim, E. Park, S. Yoo, T. Choi, L. Yang, D. Shin: Compression of deep convolutional neural networks for fast and
low power mobile applications, ICLR 2016. Convolutions become Tucker-2 decompositions, three convolutions each
(`tensors.py`, `layers.py`); 1×1 convolutions and linear layers but the last become two factors. The ranks come from
VBMF (`vbmf.py`) on the unfoldings of each weight (`ranks.py`). With `vbmf_form` "channel" or "spatial", matrix
decompositions take the place of Tucker's: the paper's `ch_vbmf_ft` and `sp_vbmf_ft`, of which the latter is the form of
C. Tai, T. Xiao, Y. Zhang, X. Wang, W. E: Convolutional neural networks with low-rank regularization, ICLR 2016.

The grids that the paper searched for the fine-tuning are `CIFAR_GRID` and `IMAGENET_GRID`, as settings.
"""

from decomposable_lab.methods.tucker.method import CIFAR_GRID, IMAGENET_GRID, METHOD

__all__ = ["CIFAR_GRID", "IMAGENET_GRID", "METHOD"]
