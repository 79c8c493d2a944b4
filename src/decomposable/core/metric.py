"""W decomposed in the metric that data give it, so that what a cut loses is least where it matters.

The network feels a change E of W as tr(A E G Eᵀ) = ‖A^½ E G^½‖²: of its output where G is the identity, of its loss to
second order and under the Kronecker approximation where G is the gradients' moment. The rank-r matrix nearest to W in
that norm is cut from the SVD of A^½ W G^½, with the roots undone afterwards. Any root R with R Rᵀ = A will do for A^½,
because ‖Rᵀ E‖ depends on R Rᵀ alone; Cholesky's is the cheapest, and undone by back-substitution.

Shape suffixes: M, N rows and columns of the matrix; K the bases that it has; D blocks of a moment, of W entries each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from decomposable.core.sums import Moments, blocks_of
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
    """W = p · q; its bases are the columns of p with the rows of q."""

    p: Tensor  # (M, K)
    q: Tensor  # (K, N)


class InMetric(NamedTuple):
    """W = p · q, best basis first; leaving basis k out loses losses[k] in the metric."""

    p: Tensor  # (M, K)
    q: Tensor  # (K, N)
    losses: Tensor  # (K,), falling


@torch.no_grad()
def decompose_in_metric(
    products: Mapping[str, Product], moments: Mapping[str, Moments], damping: float = DAMPING
) -> dict[str, InMetric]:
    """Every matrix' bases in the metric of its moments, as many as it had; both sides of a basis are of one length.

    The bases of a product span what they spanned before: a matrix that was cut is turned inside what is left of it. A
    layer that no data reached, or whose output no gradient came back to, loses nothing.
    """
    found: dict[str, InMetric] = {}
    for part in _parts(products):  # the roots of all of them at once would be several times the moments
        found |= _decompose({name: products[name] for name in part}, moments, damping)
    return found


def _parts(products: Mapping[str, Product]) -> Iterator[list[str]]:
    """The names in groups whose roots fit in `MOST_ROOTS`; one that fits in none has a group of its own."""
    part: list[str] = []
    left = MOST_ROOTS
    for name, product in products.items():
        size = 8 * sum(count * block**2 for count, block in map(blocks_of, (len(product.p), product.q.shape[1])))
        if part and size > left:
            yield part
            part, left = [], MOST_ROOTS
        part.append(name)
        left -= size
    if part:
        yield part


def _decompose(products: Mapping[str, Product], moments: Mapping[str, Moments], damping: float) -> dict[str, InMetric]:
    roots = {name: _roots(moments[name], product.p, damping) for name, product in products.items()}
    inner, sides = {}, {}
    for name, (p_MK, q_KN) in products.items():
        left, right = roots[name]
        p_MK, q_NK = left.times(p_MK.double()), right.times(q_KN.double().mT)
        # Orthonormal sides leave a small square matrix to decompose, whatever the sizes of the two.
        (left_MK, a_KK), (right_NK, b_KK) = torch.linalg.qr(p_MK), torch.linalg.qr(q_NK)
        inner[name], sides[name] = a_KK @ b_KK.mT, (left_MK, right_NK)
    found = {}
    for name, (u_KK, s_K, v_KK) in svd(inner).items():
        (left, right), (left_MK, right_NK) = roots[name], sides[name]
        p_MK, q_NK = left.undone(left_MK @ u_KK), right.undone(right_NK @ v_KK)
        share_K = (s_K * q_NK.norm(dim=0) / p_MK.norm(dim=0)).sqrt()
        other_K = torch.where(share_K > 0, s_K / share_K, 0.0)
        losses_K = s_K.square() if _is_felt(moments[name]) else torch.zeros_like(s_K)
        found[name] = InMetric(p_MK * share_K, (q_NK * other_K).mT, losses_K)
    return found


@torch.no_grad()
def losses_in_metric(product: Product, moments: Moments) -> Tensor:
    """What cutting a product to each rank 0, 1, …, K loses in the metric of these moments, which may be others than
    those that its bases come from: tr(A E G Eᵀ) with E the bases beyond the rank.

    With the columns p_k and the rows q_k of the product that is Σ (pᵀ A p)_kl (q G qᵀ)_kl over k, l beyond the rank.
    """
    left_KK = _seen(moments.inputs, product.p)
    right_KK = _seen(moments.gradients, product.q.mT)
    # The sum over the lower right square of the matrix from every corner of its diagonal on.
    sums_KK = (left_KK * right_KK).flip(0, 1).cumsum(0).cumsum(1)
    return torch.cat([sums_KK.diagonal().flip(0), sums_KK.new_zeros(1)])


def _seen(moment: Tensor | None, p_MK: Tensor) -> Tensor:
    """Pᵀ A P; without a moment, Pᵀ P."""
    p_MK = p_MK.double()
    if moment is None:
        return p_MK.mT @ p_MK
    p_DWK = _in_blocks(p_MK, _as_blocks(moment))
    return (p_DWK.mT @ (_as_blocks(moment).to(p_MK) @ p_DWK)).sum(dim=0)


def _is_felt(moments: Moments) -> bool:
    """Whether data reached the layer, and gradients its output."""
    sides = [moments.inputs] if moments.gradients is None else [moments.inputs, moments.gradients]
    return not any(map(_is_zero, sides))


def _is_zero(moment: Tensor) -> bool:
    return bool(moment.diagonal(dim1=-2, dim2=-1).max() < SMALLEST)


@dataclass(frozen=True, eq=False)
class _Root:
    """A root of one side's moment: lower triangles L with L Lᵀ = A, one for each block; None for the identity."""

    blocks: Tensor | None  # (D × W × W)

    def times(self, p_MK: Tensor) -> Tensor:
        """Lᵀ P."""
        if self.blocks is None:
            return p_MK
        return (self.blocks.mT @ _in_blocks(p_MK, self.blocks)).flatten(0, 1)[: len(p_MK)]

    def undone(self, p_MK: Tensor) -> Tensor:
        """L⁻ᵀ P: of what `times` gave, what it was."""
        if self.blocks is None:
            return p_MK
        found = torch.linalg.solve_triangular(self.blocks.mT, _in_blocks(p_MK, self.blocks), upper=True)
        return found.flatten(0, 1)[: len(p_MK)]


def _as_blocks(moment: Tensor) -> Tensor:
    return moment if moment.dim() == 3 else moment[None]


def _in_blocks(p_MK: Tensor, blocks: Tensor) -> Tensor:
    """(D × W × K): the rows that each block is for, the last ones filled up with zeros."""
    count, block, _ = blocks.shape
    return F.pad(p_MK, (0, 0, 0, count * block - len(p_MK))).view(count, block, -1)


def _roots(moments: Moments, like: Tensor, damping: float) -> tuple[_Root, _Root]:
    gradients = moments.gradients
    right = _Root(None) if gradients is None else _root(gradients, like, damping)
    return _root(moments.inputs, like, damping), right


def _root(moment: Tensor, like: Tensor, damping: float) -> _Root:
    """That of the damped moment, where the matrix is; of a moment of zeros, the identity.

    Near the smallest numbers of float32 its rounding can be more than the damping: then that grows until L exists.
    """
    blocks = _as_blocks(moment).to(like.device, torch.float64, copy=True)
    if _is_zero(blocks):
        return _Root(None)
    diagonals = blocks.diagonal(dim1=-2, dim2=-1)
    mean, before = diagonals.mean(), diagonals.clone()
    for times in GROWTH:
        diagonals.copy_(before + times * damping * mean)
        roots, fails = torch.linalg.cholesky_ex(blocks)
        if not fails.any():
            return _Root(roots)
    return _Root(torch.linalg.cholesky(blocks))  # says what is wrong
