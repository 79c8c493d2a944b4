"""W decomposed in the metric that data give it, so that what a cut loses is least where it matters.

The network feels a change E of W as tr(A E G Eᵀ) = ‖A^½ E G^½‖²: of its output where G is the identity, of its loss to
second order and under the Kronecker approximation where G is the gradients' moment. The rank-r matrix nearest to W in
that norm is cut from the SVD of A^½ W G^½, with the roots undone afterwards. Any root R with R Rᵀ = A will do for A^½,
because ‖Rᵀ E‖ depends on R Rᵀ alone; Cholesky's is the cheapest, and undone by back-substitution.

Shape suffixes: M, N rows and columns of the matrix; K the bases that it has; D blocks of a moment, of W entries each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from decomposable.core.sums import Moments, bytes_of, grouped
from decomposable.core.svd import svd

DAMPING = 1e-3
"""Of the mean of a moment's diagonal, added to the diagonal: directions that the data never used are not free."""

GROWTH = (1, 10, 100, 1_000, 10_000)
"""Times the damping: the first with which a moment has a root is taken."""

SMALLEST = torch.finfo(torch.float32).tiny
"""Moments are float32: one whose diagonal is below this everywhere has lost its digits, and counts as zero. So it is
with the gradients of a network that is certain of every image."""

MOST_ROOTS = 1 << 29
"""Bytes of roots that are held at a time: 512 MiB, besides the moments."""


class Product(NamedTuple):
    """Hold W = p · q; its bases are the columns of p with the rows of q."""

    p: Tensor  # (M, K)
    q: Tensor  # (K, N)


class InMetric(NamedTuple):
    """Hold W = p · q, best basis first; leaving basis k out loses losses[k] in the metric."""

    p: Tensor  # (M, K)
    q: Tensor  # (K, N)
    losses: Tensor  # (K,), falling


@torch.no_grad()
def decompose_in_metric(
    products: Mapping[str, Product], moments: Mapping[str, Moments], damping: float = DAMPING
) -> dict[str, InMetric]:
    """Return every matrix' bases in the metric of its moments, as many as it had, with both sides of one length.

    The bases of a product span what they spanned before: a matrix that was cut is turned inside what is left of it. A
    layer that no data reached, or whose output no gradient came back to, loses nothing.
    """
    found: dict[str, InMetric] = {}
    # The roots of all of them at once would be several times the moments.
    for part in grouped({name: bytes_of((len(p), q.shape[1])) for name, (p, q) in products.items()}, MOST_ROOTS):
        found |= _decompose({name: products[name] for name in part}, moments, damping)
    return found


def _decompose(products: Mapping[str, Product], moments: Mapping[str, Moments], damping: float) -> dict[str, InMetric]:
    inner, sides, found = {}, {}, {}
    for name, (p_MK, q_KN) in products.items():
        left, right = (_root(each, p_MK.device, damping) for each in (moments[name].inputs, moments[name].gradients))
        # Orthonormal sides leave a small square matrix to decompose, whatever the sizes of the two.
        left_MK, a_KK = torch.linalg.qr(_times(left, p_MK.double()))
        right_NK, b_KK = torch.linalg.qr(_times(right, q_KN.double().mT))
        inner[name], sides[name] = a_KK @ b_KK.mT, (left, left_MK, right, right_NK)
    for name, (u_KK, s_K, v_KK) in svd(inner).items():
        left, left_MK, right, right_NK = sides[name]
        p_MK, q_NK = _undone(left, left_MK @ u_KK), _undone(right, right_NK @ v_KK)
        share_K = (s_K * q_NK.norm(dim=0) / p_MK.norm(dim=0)).sqrt()
        other_K = torch.where(share_K > 0, s_K / share_K, 0.0)
        is_felt = not any(map(_is_zero, moments[name].sides))  # data reached the layer, and gradients its output
        losses_K = s_K.square() if is_felt else torch.zeros_like(s_K)
        found[name] = InMetric(p_MK * share_K, (q_NK * other_K).mT, losses_K)
    return found


@torch.no_grad()
def losses_in_metric(product: Product, moments: Moments) -> Tensor:
    """Return what cutting a product to each rank 0, 1, …, K loses in the metric of these moments, which may be others
    than those that its bases come from: tr(A E G Eᵀ) with E the bases beyond the rank.

    With the columns p_k and the rows q_k of the product that is Σ (pᵀ A p)_kl (q G qᵀ)_kl over k, l beyond the rank.
    """
    left_KK, right_KK = _seen(moments.inputs, product.p), _seen(moments.gradients, product.q.mT)
    # The sum over the lower right square of the matrix from every corner of its diagonal on.
    sums_KK = (left_KK * right_KK).flip(0, 1).cumsum(0).cumsum(1)
    return torch.cat([sums_KK.diagonal().flip(0), sums_KK.new_zeros(1)])


def _seen(moment: Tensor | None, p_MK: Tensor) -> Tensor:
    """Return Pᵀ A P; without a moment, Pᵀ P."""
    p_MK = p_MK.double()
    if moment is None:
        return p_MK.mT @ p_MK
    blocks_DWW = _as_blocks(moment).to(p_MK)
    p_DWK = _in_blocks(p_MK, blocks_DWW)
    return (p_DWK.mT @ (blocks_DWW @ p_DWK)).sum(dim=0)


def _is_zero(moment: Tensor) -> bool:
    return bool(moment.diagonal(dim1=-2, dim2=-1).max() < SMALLEST)


def _root(moment: Tensor | None, device: torch.device, damping: float) -> Tensor | None:
    """Return a root of the damped moment: lower triangles L with L Lᵀ = A, one for each block.

    None is the identity, for want of a moment or of anything in it. Near the smallest numbers of float32 the rounding
    of a moment can be more than the damping: then that grows until L exists.
    """
    if moment is None or _is_zero(moment):
        return None
    blocks_DWW = _as_blocks(moment).to(device, torch.float64, copy=True)
    diagonals = blocks_DWW.diagonal(dim1=-2, dim2=-1)
    mean, before = diagonals.mean(), diagonals.clone()
    for times in GROWTH:
        diagonals.copy_(before + times * damping * mean)
        roots_DWW, fails = torch.linalg.cholesky_ex(blocks_DWW)
        if not fails.any():
            return roots_DWW
    return torch.linalg.cholesky(blocks_DWW)  # says what is wrong


def _times(root_DWW: Tensor | None, p_MK: Tensor) -> Tensor:
    """Return Lᵀ P."""
    if root_DWW is None:
        return p_MK
    return (root_DWW.mT @ _in_blocks(p_MK, root_DWW)).flatten(0, 1)[: len(p_MK)]


def _undone(root_DWW: Tensor | None, p_MK: Tensor) -> Tensor:
    """Return L⁻ᵀ P: of what `_times` gave, what it was."""
    if root_DWW is None:
        return p_MK
    found = torch.linalg.solve_triangular(root_DWW.mT, _in_blocks(p_MK, root_DWW), upper=True)
    return found.flatten(0, 1)[: len(p_MK)]


def _as_blocks(moment: Tensor) -> Tensor:
    return moment if moment.dim() == 3 else moment[None]


def _in_blocks(p_MK: Tensor, blocks_DWW: Tensor) -> Tensor:
    """Return the rows that each block is for, the last ones filled up with zeros: (D × W × K)."""
    count, block, _ = blocks_DWW.shape
    return F.pad(p_MK, (0, 0, 0, count * block - len(p_MK))).view(count, block, -1)
