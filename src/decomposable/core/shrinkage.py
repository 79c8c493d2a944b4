"""How far the moments of a few images can be believed: Ledoit and Wolf's shrinkage towards the weights' own metric.

A moment S of few images has directions that none of them used. They look free, and are not: other images use them. What
is known of a direction before any image is seen is that all are alike, μ1 with μ the mean of the diagonal, in which a
layer is cut as its singular values say. The mixture

    (1 − ρ) S + ρ μ 1        ρ = E‖S − Σ‖² / E‖S − μ1‖²

is the nearest one to the moment Σ of endless data (Ledoit and Wolf, 2004). The numerator is what the batches tell by
how much they differ (`sums.py`): positions of one image are not independent, batches are.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from decomposable.core.sums import Moments


def shrunk(moments: Moments) -> Moments:
    """The same moments as far as they can be believed."""
    inputs = shrunk_moment(moments.inputs, moments.inputs_error)
    if moments.gradients is None:
        return replace(moments, inputs=inputs)
    return replace(moments, inputs=inputs, gradients=shrunk_moment(moments.gradients, moments.gradients_error))


def of_weights(moments: Moments) -> Moments:
    """Moments of the same size that know no direction: a layer is cut as its singular values say."""
    inputs = _mixed(moments.inputs, 1.0)
    return replace(
        moments, inputs=inputs, gradients=None if moments.gradients is None else _mixed(moments.gradients, 1.0)
    )


def shrunk_moment(moment: Tensor, error: float) -> Tensor:
    """(1 − ρ) S + ρ μ 1.

    >>> import torch
    >>> shrunk_moment(torch.diag(torch.tensor([4.0, 0.0])), 4.0)  # ‖S − μ1‖² is 8
    tensor([[3., 0.],
            [0., 1.]])
    """
    mean = float(moment.diagonal(dim1=-2, dim2=-1).mean())
    apart = float(moment.double().square().sum()) - moment.diagonal(dim1=-2, dim2=-1).numel() * mean**2  # ‖S − μ1‖²
    return _mixed(moment, min(1.0, error / apart) if apart > 0 else 0.0)


def _mixed(moment: Tensor, share: float) -> Tensor:
    mixed = moment * (1 - share)
    diagonal = mixed.diagonal(dim1=-2, dim2=-1)
    diagonal += share * moment.diagonal(dim1=-2, dim2=-1).mean()
    return mixed
