"""The projection P = U_r U_rᵀ onto a matrix' leading left singular vectors, and its gradient.

Precision, order, sign and the bound of clipping are those of `svd.py`.

Shape suffixes: M, N rows and columns of the matrix; R the kept vectors, T = M − R the others, null vectors included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decomposable.core.svd import RHO_MAX, Left


def projection_gradient(left: Left, ut_grad_RT: Tensor, added_gap: float = 0.0) -> Tensor:
    """Z (M × M, symmetric) with ∂L/∂W = Z W, where L depends on W by P alone.

    From perturbation theory of the eigenvectors of WWᵀ, with i kept and k dropped,

        dP = Σ_ik (u_i u_kᵀ + u_k u_iᵀ) · u_iᵀ d(WWᵀ) u_k / (σ_i² − σ_k²),

    so that ∂L/∂W = 2 U X Uᵀ W, X_ik = X_ki = u_iᵀ sym(∂L/∂P) u_k / (σ_i² (1 − ρ²)), ρ = σ_k/σ_i clipped at δ as in
    appendix A, and 0 between two that are kept or two that are dropped. With an added gap ε, σ_i² − σ_k² + ε takes the
    place of the clipped difference.

    All M vectors take part: a dropped one with σ_k = 0 adds nothing to W, but the kept ones may turn to it. A kept one
    with σ_i = 0 has no direction of its own, and contributes nothing.

    `ut_grad_RT` is 2 u_iᵀ sym(∂L/∂P) u_k: the kept rows and the dropped columns of Uᵀ(∂L/∂P + (∂L/∂P)ᵀ)U.
    """
    rank = len(ut_grad_RT)
    s_M = torch.zeros(len(left.u), dtype=left.s.dtype, device=left.s.device)
    s_M[: len(left.s)] = left.s
    s_R1, s_1T = s_M[:rank, None], s_M[None, rank:]
    is_zero_R1 = s_R1 < torch.finfo(s_M.dtype).tiny
    safe_R1 = torch.where(is_zero_R1, 1.0, s_R1)
    if added_gap:
        x_RT = ut_grad_RT / (s_R1.square() - s_1T.square() + added_gap)
    else:
        rho_RT = (s_1T / safe_R1).clamp(max=RHO_MAX)
        x_RT = ut_grad_RT / safe_R1 / safe_R1 / (1 - rho_RT.square())  # one by one: the square of a small σ may vanish
    x_RT = torch.where(is_zero_R1, 0.0, x_RT)
    half_MM = left.u[:, :rank] @ x_RT @ left.u[:, rank:].mT
    return half_MM + half_MM.mT
