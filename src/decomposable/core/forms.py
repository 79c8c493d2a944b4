"""Channel and spatial form: weight ↔ matrix, and the two weights that a pair of factors stands for.

A convolution weight has four axes, a matrix two, so the axes have to be split into rows and columns. Section 2 of the
paper leaves the split open; these are the two of its experiments (section 4):

=========  ==========================  =============================  ===========================
form       matrix W (M × N)            first factor, U                second factor, S·Vᵀ
=========  ==========================  =============================  ===========================
channel    (I·H·W) × O                 H×W convolution, I → R         1×1 convolution, R → O
spatial    (I·W) × (O·H)               1×W convolution, I → R         H×1 convolution, R → O
=========  ==========================  =============================  ===========================

A linear layer is the channel form with H = W = 1.

Shape suffixes: O, I output and input channels; H, W kernel height and width; M, N rows and columns of the matrix;
R bases (the rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast, get_args

from torch import Tensor

from decomposable.errors import InvalidArgumentError
from decomposable.sizing.cost import factor_sizes, forms_of

Form = Literal["channel", "spatial"]
FORMS: tuple[str, ...] = get_args(Form)


def check_form(form: str) -> Form:
    """Return `form` if it is one of `FORMS`, else raise."""
    if form not in FORMS:
        raise InvalidArgumentError(f"form={form!r} is not known; allowed: {', '.join(map(repr, FORMS))}")
    return cast(Form, form)


def form_for(shape: Sequence[int], form: Form) -> Form:
    """The form a weight of this shape takes: 1×1 kernels and linear layers have nothing spatial to split.

    >>> form_for((8, 4, 1, 1), "spatial"), form_for((8, 4, 3, 3), "spatial")
    ('channel', 'spatial')
    """
    return form if form in forms_of(shape) else "channel"


def matrix_shape(shape: Sequence[int], form: Form) -> tuple[int, int]:
    """(M, N) of a weight of this shape, without making the matrix."""
    return factor_sizes(shape, form)  # a row or column of the matrix is a basis' part of a factor


def to_matrix(w_OIHW: Tensor, form: Form) -> Tensor:
    """Weight → matrix W of the paper, so that y = Wᵀx. Exact: only the axes move."""
    if form == "spatial":
        out_channels, in_channels, height, width = w_OIHW.shape
        return w_OIHW.permute(1, 3, 0, 2).reshape(in_channels * width, out_channels * height)
    return w_OIHW.reshape(w_OIHW.shape[0], -1).mT


def to_weight(w_MN: Tensor, shape: Sequence[int], form: Form) -> Tensor:
    """Matrix → weight of the given shape: the inverse of `to_matrix`."""
    if form == "spatial":
        out_channels, in_channels, height, width = shape
        return w_MN.reshape(in_channels, width, out_channels, height).permute(2, 0, 3, 1)
    return w_MN.mT.reshape(tuple(shape))


def first_weight(p_MR: Tensor, shape: Sequence[int], form: Form) -> Tensor:
    """The weight of the first of the two layers, input → R bases, from the left factor."""
    rank = p_MR.shape[1]
    return p_MR.mT.reshape(rank, shape[1], 1, shape[3]) if form == "spatial" else p_MR.mT.reshape(rank, *shape[1:])


def second_weight(q_RN: Tensor, shape: Sequence[int], form: Form) -> Tensor:
    """The weight of the second of the two layers, R bases → output, from the right factor."""
    rank = q_RN.shape[0]
    if form == "spatial":
        return q_RN.reshape(rank, shape[0], shape[2]).permute(1, 0, 2).unsqueeze(-1)
    return q_RN.mT.reshape(shape[0], rank, *(1 for _ in shape[2:]))


def to_factors(first: Tensor, second: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """The factors P (M × R) and Q (R × N) that two weights stand for: the inverse of the two functions above."""
    rank = first.shape[0]
    is_spatial = form == "spatial"
    q_RN = second.squeeze(-1).permute(1, 0, 2).reshape(rank, -1) if is_spatial else second.reshape(-1, rank).mT
    return first.reshape(rank, -1).mT, q_RN
