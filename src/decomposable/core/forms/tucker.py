"""Tucker-2, the extension that the paper names: both channel axes are cut, by the SVDs of the two unfoldings (HOSVD).

    W̃ = W ×_I P_a ×_O P_b        P_a, P_b: projections onto the leading left singular vectors of W's two unfoldings

    1×1, I → a  ──┆──  kernel, a → b  ──┆──  1×1, b → O        U_aᵀ,  C = W ×_I U_aᵀ ×_O U_bᵀ,  U_b

Any (a, b) is a slice of the one full core, so every size is contained in every larger one. A basis scores by the
singular value of its own unfolding. The eigenproblems are C × C for C channels, where the spatial form's are 3C × 3C.

Shape suffixes: O, I output and input channels; A, B their ranks; K the kernel's axes, laid end to end where a matrix is
meant; T the vectors of a mode that were cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decomposable.core.forms.matrix import Form
from decomposable.core.svd import RHO_MAX, Left, left_svd, numerical_rank, project_left
from decomposable_edge.sizing.chain import Chain

_INPUTS, _OUTPUTS = 1, 0  # the axes of a weight


class HOSVD(NamedTuple):
    """Hold all left singular vectors of a weight's two unfoldings, and their singular values."""

    u_in: Tensor  # (I, I)
    s_in: Tensor
    u_out: Tensor  # (O, O)
    s_out: Tensor

    @property
    def spectra(self) -> tuple[Tensor, ...]:
        """Return those of the cut behind the inputs, and of the one before the outputs."""
        return self.s_in, self.s_out

    @property
    def inputs(self) -> Left:
        """Return the unfolding whose rows are the inputs."""
        return Left(self.u_in, self.s_in)

    @property
    def outputs(self) -> Left:
        """Return the unfolding whose rows are the outputs."""
        return Left(self.u_out, self.s_out)


class Tucker(Form):
    """Decompose weights into 1×1, the kernel between a and b channels, 1×1."""

    def decompose(self, weights: Mapping[str, Tensor]) -> dict[str, HOSVD]:
        """Return both unfoldings' bases of every weight."""
        inputs, outputs = (
            left_svd({name: unfolded(weight, mode) for name, weight in weights.items()}) for mode in (_INPUTS, _OUTPUTS)
        )
        return {name: HOSVD(*inputs[name], *outputs[name]) for name in weights}

    def project(self, weight: Tensor, kept: Any) -> HOSVD:
        """Return both unfoldings along the vectors kept."""
        inputs = project_left(unfolded(weight, _INPUTS), kept.inputs)
        return HOSVD(*inputs, *project_left(unfolded(weight, _OUTPUTS), kept.outputs))

    def tensors(self, chain: Chain) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the vectors and values of both unfoldings."""
        (outputs, inputs), (in_rank, out_rank) = chain.shape[:2], chain.full_ranks
        return {"u_in": (inputs, inputs), "s_in": (in_rank,), "u_out": (outputs, outputs), "s_out": (out_rank,)}

    def matrices(self, chain: Chain) -> tuple[tuple[int, int], ...]:
        """Return the shapes of both unfoldings."""
        outputs, inputs = chain.shape[:2]
        return (inputs, chain.dense_size // inputs), (outputs, chain.dense_size // outputs)

    def restored(self, tensors: Mapping[str, Any]) -> HOSVD:
        """Return the decomposition that has these tensors."""
        return HOSVD(**{name: tensors[name] for name in HOSVD._fields})

    def influences(self, gradient: Tensor, weight: Tensor, decomposition: Any) -> tuple[Tensor, ...]:
        """Return |σ_i · ∂L/∂σ_i|, which is u_iᵀ G Mᵀ u_i for an unfolding M, because M v_i = σ_i u_i."""
        found = []
        for mode, (u, s) in ((_INPUTS, decomposition.inputs), (_OUTPUTS, decomposition.outputs)):
            along = [u[:, : len(s)].mT @ unfolded(each, mode).to(s.dtype) for each in (gradient, weight)]
            found.append((along[0] * along[1]).sum(dim=1).abs())
        return tuple(found)

    def weights(self, weight: Tensor, decomposition: Any, orders: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return U_aᵀ, the core and U_b at full rank."""
        u_IA, u_OB = decomposition.u_in[:, orders[0]], decomposition.u_out[:, orders[1]]
        return _as_stages(u_IA, _core(weight.to(u_IA.dtype), u_IA, u_OB), u_OB)

    def truncate(
        self, weight: Tensor, decomposition: Any, ranks: Sequence[int], added_gap: float = 0.0
    ) -> tuple[Tensor, ...]:
        """Return U_aᵀ, the core and U_b, differentiable in W.

        Bases with σ = 0 (to rounding) are left out whatever the ranks say, as by `svd.truncate`.
        """
        kept = [max(1, min(r, numerical_rank(s))) for r, s in zip(ranks, decomposition.spectra, strict=True)]
        u_IA, core, u_OB = _Truncate.apply(weight, *decomposition, *kept, added_gap)
        return _as_stages(u_IA, core, u_OB)


def unfolded(w_OIK: Tensor, mode: int) -> Tensor:
    """Return the matrix whose rows are the slices along one axis: 0 for output, 1 for input channels."""
    return w_OIK.transpose(0, mode).flatten(1)


def multiplied(w_OIK: Tensor, matrix: Tensor, mode: int) -> Tensor:
    """Return W ×_mode matrix: every fibre along that axis multiplied with the matrix from the left."""
    others = w_OIK.transpose(0, mode)
    return (matrix @ others.flatten(1)).reshape(len(matrix), *others.shape[1:]).transpose(0, mode)


def _core(w_OIK: Tensor, u_IA: Tensor, u_OB: Tensor) -> Tensor:
    """Return W ×_I U_aᵀ ×_O U_bᵀ."""
    return multiplied(multiplied(w_OIK, u_IA.mT, _INPUTS), u_OB.mT, _OUTPUTS)


def _as_stages(u_IA: Tensor, core_BAK: Tensor, u_OB: Tensor) -> tuple[Tensor, ...]:
    """Return the weights of the three layers."""
    ones = (1,) * (core_BAK.dim() - 2)
    return u_IA.mT.reshape(*u_IA.mT.shape, *ones), core_BAK, u_OB.reshape(*u_OB.shape, *ones)


class _Truncate(torch.autograd.Function):
    """(W, its HOSVD, a, b) → (U_a, C, U_b), with the gradient for W only: the HOSVD is a function of W already.

    Whatever is computed from W̃ = C ×_I U_a ×_O U_b, be it W̃ itself or the three layers one after the other, depends on
    W by itself and by the two projections. With G = ∂L/∂W̃ and M, Y the unfoldings of W and of W ×_O P_b whose rows are
    the inputs, W̃ unfolded is P_a Y, so ∂L/∂P_a = G Yᵀ, of which

        u_kᵀ (G Yᵀ) u_i  is row k of Uᵀ ∂L/∂U_a          (i kept, k dropped)
        u_iᵀ (G Yᵀ) u_k  = Σ (∂L/∂C)_i · (M ×_O U_bᵀ)ᵀ u_k ,

    and the same for the outputs: the gradients of the three outputs are all of G that is needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        w_OIK: Tensor,
        u_in: Tensor,
        s_in: Tensor,
        u_out: Tensor,
        s_out: Tensor,
        in_rank: int,
        out_rank: int,
        added_gap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(w_OIK, u_in, s_in, u_out, s_out)
        ctx.ranks, ctx.added_gap = (in_rank, out_rank), added_gap
        u_IA, u_OB = u_in[:, :in_rank], u_out[:, :out_rank]
        core_BAK = _core(w_OIK.to(u_in.dtype), u_IA, u_OB)
        return u_IA.to(w_OIK.dtype, copy=True), core_BAK.to(w_OIK.dtype), u_OB.to(w_OIK.dtype, copy=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_IA: Tensor, grad_BAK: Tensor, grad_OB: Tensor) -> tuple[Tensor | None, ...]:
        weight, *rest = ctx.saved_tensors
        found, (in_rank, out_rank) = HOSVD(*rest), ctx.ranks
        dtype = found.u_in.dtype
        with torch.autocast(weight.device.type, enabled=False):
            w_OIK, g_BAK = weight.to(dtype), grad_BAK.to(dtype)
            u_IA, u_OB = found.u_in[:, :in_rank], found.u_out[:, :out_rank]
            reduced = {
                _INPUTS: multiplied(w_OIK, u_OB.mT, _OUTPUTS),
                _OUTPUTS: multiplied(w_OIK, u_IA.mT, _INPUTS),
            }
            grad_w_OIK = multiplied(multiplied(g_BAK, u_IA, _INPUTS), u_OB, _OUTPUTS)
            for mode, left, grad_u in ((_INPUTS, found.inputs, grad_IA), (_OUTPUTS, found.outputs, grad_OB)):
                rank = grad_u.shape[1]
                if rank == len(left.u):
                    continue  # P = 1, whatever W is
                dropped = left.u[:, rank:]
                along = unfolded(g_BAK, mode) @ unfolded(reduced[mode], mode).mT + grad_u.to(dtype).mT
                z = projection_gradient(left, along @ dropped, ctx.added_gap)
                grad_w_OIK = grad_w_OIK + multiplied(w_OIK, z, mode)
        return grad_w_OIK.to(weight.dtype), *(None for _ in range(7))


def projection_gradient(left: Left, ut_grad_RT: Tensor, added_gap: float = 0.0) -> Tensor:
    """Return Z (M × M, symmetric) with ∂L/∂W = Z W, where L depends on W by P alone.

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
