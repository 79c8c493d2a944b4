"""Tucker-2: a convolution weight as a small core and a matrix for each of its two channel modes.

    W ≈ C ×_O U ×_I V,   that is   w_OIHW = Σ_RS u_OR · c_RSHW · v_IS,

with orthonormal columns in U and V. Given the ranks, the best one is sought by higher-order orthogonal iteration (L. De
Lathauwer, B. De Moor, J. Vandewalle: On the best rank-1 and rank-(R1, R2, …, RN) approximation of higher-order tensors,
SIAM J. Matrix Anal. Appl. 21, 2000): U is best for a given V, then V for that U, and so on, each by one SVD.

Shape suffixes: O, I output and input channels; R, S their ranks; H, W kernel height and width; A, B ranks that were
larger before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decomposable.core.svd import svd

TOLERANCE = 1e-6
"""The iteration ends where the error, as a part of ‖W‖, falls by less than this."""

MAX_ITERATIONS = 50

Kept = tuple[int | None, ...]
"""The ranks of a layer: (R, S), of the output and the input mode, for Tucker, (R,) for two factors. None leaves a mode
whole, with no matrix of its own; all None is dense."""


class Tucker2(NamedTuple):
    """Hold W ≈ core ×_O u ×_I v; a mode without a matrix is whole."""

    core: Tensor  # (R, S, H, W)
    u: Tensor | None  # (O, R)
    v: Tensor | None  # (I, S)

    def weight(self) -> Tensor:
        """Return the weight that the three stand for, (O, I, H, W)."""
        return _expanded(_expanded(self.core, self.u, 0), self.v, 1)


def unfold(w_OIHW: Tensor, mode: int) -> Tensor:
    """Return the matrix whose rows are the slices along one mode: 0 for output, 1 for input channels.

    >>> unfold(torch.zeros(5, 4, 3, 3), 0).shape, unfold(torch.zeros(5, 4, 3, 3), 1).shape
    (torch.Size([5, 36]), torch.Size([4, 45]))
    """
    return w_OIHW.transpose(0, mode).flatten(1)


@torch.no_grad()
def tucker2(
    w_OIHW: Tensor, ranks: Kept, *, tolerance: float = TOLERANCE, max_iterations: int = MAX_ITERATIONS
) -> Tucker2:
    """Return the Tucker-2 decomposition of a weight at these ranks, in float64.

    The start is V of the truncated higher-order SVD. Since U and V are orthonormal, the squared error of the best core,
    C = W ×_O Uᵀ ×_I Vᵀ, is ‖W‖² − ‖C‖², and every half step can only raise ‖C‖.

    A rank above what the other one allows (R ≤ S·H·W, S ≤ R·H·W) would add columns that the core never uses: it is cut.

    >>> w = torch.randn(6, 5, 3, 3, dtype=torch.float64)
    >>> core, u, v = tucker2(w, (4, 2))
    >>> core.shape, u.shape, v.shape
    (torch.Size([4, 2, 3, 3]), torch.Size([6, 4]), torch.Size([5, 2]))
    """
    w_OIHW = w_OIHW.double()
    out_rank, in_rank = possible_ranks(w_OIHW.shape, ranks)
    if out_rank is None or in_rank is None:  # one SVD is all
        u = None if out_rank is None else _leading(w_OIHW, 0, out_rank)
        v = None if in_rank is None else _leading(w_OIHW, 1, in_rank)
        return Tucker2(_reduced(_reduced(w_OIHW, u, 0), v, 1), u, v)
    norm = float(torch.linalg.vector_norm(w_OIHW))
    v_IS, before = _leading(w_OIHW, 1, in_rank), float("inf")
    for _ in range(max_iterations):
        u_OR = _leading(_reduced(w_OIHW, v_IS, 1), 0, out_rank)
        half_RIHW = _reduced(w_OIHW, u_OR, 0)
        v_IS = _leading(half_RIHW, 1, in_rank)
        core_RSHW = _reduced(half_RIHW, v_IS, 1)
        error = max(0.0, norm**2 - float(core_RSHW.square().sum())) ** 0.5
        if before - error <= tolerance * norm:
            break
        before = error
    return Tucker2(core_RSHW, u_OR, v_IS)


def possible_ranks(shape: Sequence[int], ranks: Kept) -> Kept:
    """Return the ranks cut to what can be used: at most the channels, and at most the other rank times H·W.

    >>> possible_ranks((64, 16, 3, 3), (80, 2)), possible_ranks((64, 16, 3, 3), (20, None))
    ((18, 2), (20, None))
    """
    out_channels, in_channels, *kernel = shape
    taps = math.prod(kernel)
    out_rank, in_rank = (None if r is None else min(r, n) for r, n in zip(ranks, shape[:2], strict=True))
    if out_rank is not None:
        out_rank = min(out_rank, (in_channels if in_rank is None else in_rank) * taps)
    if in_rank is not None:
        in_rank = min(in_rank, (out_channels if out_rank is None else out_rank) * taps)
    return out_rank, in_rank


@torch.no_grad()
def decomposed_again(tucker: Tucker2, ranks: Kept) -> Tucker2:
    """Return the Tucker-2 decomposition, at smaller ranks, of the weight that another one stands for after training.

    Training leaves U and V with columns that are no longer orthonormal. With U = Q_U A and V = Q_V B, Q orthonormal,
    W = (C ×_O A ×_I B) ×_O Q_U ×_I Q_V, so the decomposition of the small tensor in brackets is that of W, its
    matrices multiplied with Q_U and Q_V: orthonormal columns change neither norms nor which approximation is best.
    """
    small, q_u_OA = _with_triangle(tucker.core.double(), tucker.u, 0)
    small, q_v_IB = _with_triangle(small, tucker.v, 1)
    core, u, v = tucker2(small, ranks)
    core, u = _carried(core, u, q_u_OA, 0)
    core, v = _carried(core, v, q_v_IB, 1)
    return Tucker2(core, u, v)


def _with_triangle(core: Tensor, matrix: Tensor | None, mode: int) -> tuple[Tensor, Tensor | None]:
    """For a matrix Q A, the core times A along the mode, and Q."""
    if matrix is None:
        return core, None
    orthonormal, triangle = torch.linalg.qr(matrix.double())
    return _expanded(core, triangle, mode), orthonormal


def _carried(
    core: Tensor, matrix: Tensor | None, orthonormal: Tensor | None, mode: int
) -> tuple[Tensor, Tensor | None]:
    """Multiply Q into the mode's new matrix, or into the core where the mode is left whole now."""
    if orthonormal is None:
        return core, matrix
    if matrix is None:
        return _expanded(core, orthonormal, mode), None
    return core, orthonormal @ matrix


def _leading(w: Tensor, mode: int, rank: int) -> Tensor:
    """Return the first left singular vectors of an unfolding."""
    return svd({"weight": unfold(w, mode)})["weight"].u[:, :rank]


def _reduced(w: Tensor, matrix: Tensor | None, mode: int) -> Tensor:
    """W times the transposed matrix along a mode: channels → rank."""
    return w if matrix is None else _expanded(w, matrix.mT, mode)


def _expanded(w: Tensor, matrix: Tensor | None, mode: int) -> Tensor:
    """W times the matrix along a mode: rank → channels."""
    return w if matrix is None else torch.tensordot(matrix, w, dims=([1], [mode])).movedim(0, mode)
