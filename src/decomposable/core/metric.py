"""W decomposed in the metric that data give it, so that what a cut loses is least where it matters.

The network feels a change E of W as tr(A E G Eᵀ) = ‖A^½ E G^½‖²: of its output where G is the identity, of its loss to
second order and under the Kronecker approximation where G is the gradients' moment. The rank-r matrix nearest to W in
that norm is cut from the SVD of A^½ W G^½, with the roots undone afterwards. Any root R with R Rᵀ = A will do for A^½,
because ‖Rᵀ E‖ depends on R Rᵀ alone; Cholesky's is the cheapest, and undone by back-substitution.

Shape suffixes: M, N rows and columns of the matrix; K the bases that it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from decomposable.core.moments import Moments
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
    for name, (p_MK, q_KN) in products.items():
        size = 8 * (p_MK.shape[0] ** 2 + q_KN.shape[1] ** 2)
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
        left_MM, right_NN = roots[name]
        p_MK = left_MM.mT @ p_MK.double()
        q_NK = q_KN.double().mT if right_NN is None else right_NN.mT @ q_KN.double().mT
        # Orthonormal sides leave a small square matrix to decompose, whatever the sizes of the two.
        (left_MK, a_KK), (right_NK, b_KK) = torch.linalg.qr(p_MK), torch.linalg.qr(q_NK)
        inner[name], sides[name] = a_KK @ b_KK.mT, (left_MK, right_NK)
    found = {}
    for name, (u_KK, s_K, v_KK) in svd(inner).items():
        (left_MM, right_NN), (left_MK, right_NK) = roots[name], sides[name]
        p_MK = torch.linalg.solve_triangular(left_MM.mT, left_MK @ u_KK, upper=True)
        q_NK = right_NK @ v_KK
        q_NK = q_NK if right_NN is None else torch.linalg.solve_triangular(right_NN.mT, q_NK, upper=True)
        share_K = (s_K * q_NK.norm(dim=0) / p_MK.norm(dim=0)).sqrt()
        other_K = torch.where(share_K > 0, s_K / share_K, 0.0)
        losses_K = s_K.square() if _is_felt(moments[name]) else torch.zeros_like(s_K)
        found[name] = InMetric(p_MK * share_K, (q_NK * other_K).mT, losses_K)
    return found


def _is_felt(moments: Moments) -> bool:
    """Whether data reached the layer, and gradients its output."""
    sides = [moments.inputs] if moments.gradients is None else [moments.inputs, moments.gradients]
    return not any(map(_is_zero, sides))


def _is_zero(moment: Tensor) -> bool:
    return bool(moment.diagonal().max() < SMALLEST)


def _roots(moments: Moments, like: Tensor, damping: float) -> tuple[Tensor, Tensor | None]:
    gradients = moments.gradients
    return _root(moments.inputs, like, damping), None if gradients is None else _root(gradients, like, damping)


def _root(moment: Tensor, like: Tensor, damping: float) -> Tensor:
    """A lower triangle L with L Lᵀ = the damped moment, where the matrix is; of a moment of zeros, the identity.

    Near the smallest numbers of float32 its rounding can be more than the damping: then that grows until L exists.
    """
    matrix = moment.to(like.device, torch.float64, copy=True)
    mean = matrix.diagonal().mean()
    if _is_zero(matrix):
        return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    diagonal = matrix.diagonal().clone()
    for times in GROWTH:
        matrix.diagonal().copy_(diagonal + times * damping * mean)
        root, fails = torch.linalg.cholesky_ex(matrix)
        if not fails:
            return root
    return torch.linalg.cholesky(matrix)  # says what is wrong
