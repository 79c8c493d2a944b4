"""W decomposed in the metric that data give it, so that what a cut loses is least where it matters.

The network feels a change E of W as tr(A E G Eᵀ) = ‖A^½ E G^½‖²: of its output where G is the identity, of its loss to
second order and under the Kronecker approximation where G is the gradients' moment. The rank-r matrix nearest to W in
that norm is cut from the SVD of A^½ W G^½, with the roots undone afterwards. Any root R with R Rᵀ = A will do for A^½,
because ‖Rᵀ E‖ depends on R Rᵀ alone; Cholesky's is the cheapest, and undone by back-substitution.

Shape suffixes: M, N rows and columns of the matrix; K = min(M, N).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decomposable.core.forms import to_matrix
from decomposable.core.layers import Layer
from decomposable.core.moments import Moments
from decomposable.core.svd import svd

DAMPING = 1e-3
"""Of the mean of a moment's diagonal, added to the diagonal: directions that the data never used are not free."""


class InMetric(NamedTuple):
    """W = p · q, best basis first; leaving basis k out loses s_k² in the metric."""

    p: Tensor  # (M, K)
    s: Tensor  # (K,)
    q: Tensor  # (K, N)


@torch.no_grad()
def decompose_in_metric(
    layers: Sequence[Layer], moments: Mapping[str, Moments], damping: float = DAMPING
) -> dict[str, InMetric]:
    """Every layer's bases in the metric of its moments. Both sides of a basis are of one length."""
    found = {}
    for layer in layers:  # one after the other: in float64 the roots of all of them would be twice the moments
        w_MN = to_matrix(layer.weight.detach(), layer.form).double()
        a_MM, g_NN = moments[layer.name].inputs, moments[layer.name].gradients
        left_MM, right_NN = _root(a_MM, damping), None if g_NN is None else _root(g_NN, damping)
        seen_MN = left_MM.mT @ w_MN
        seen_MN = seen_MN if right_NN is None else seen_MN @ right_NN
        u_MK, s_K, v_NK = svd({layer.name: seen_MN})[layer.name]
        p_MK = torch.linalg.solve_triangular(left_MM.mT, u_MK, upper=True)
        q_NK = v_NK if right_NN is None else torch.linalg.solve_triangular(right_NN.mT, v_NK, upper=True)
        length_K = s_K * q_NK.norm(dim=0) / p_MK.norm(dim=0)
        found[layer.name] = InMetric(p_MK * length_K.sqrt(), s_K, (q_NK * (s_K / length_K.sqrt().clamp(min=1e-300))).mT)
    return found


def _root(moment: Tensor, damping: float) -> Tensor:
    """A lower triangle L with L Lᵀ = the damped moment; of a moment of zeros, the identity."""
    matrix = moment.double()
    mean = matrix.diagonal().mean()
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    if not mean > 0:
        return identity
    return torch.linalg.cholesky(matrix + damping * mean * identity)
