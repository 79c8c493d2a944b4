"""The decomposition W = U S Vᵀ, and what is cut from it, with the paper's clipped gradient (appendix A).

Everything that has to be decided about an SVD is decided here and nowhere else: precision, order, sign, what a zero
singular value means, and how close two singular values may come before a gradient is clipped.

Shape suffixes: B stacked matrices; M, N rows and columns; K = min(M, N), the full rank; R the kept rank; T the bases
that were cut off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decomposable_edge.errors import NonFiniteError

RHO_MAX = 0.99**0.5
"""δ: the ratio ρ = σ_k/σ_i of a cut-off to a kept singular value is clipped here, so that 1/(1 − ρ²) ≤ 100."""

_GRAM_FLOOR = 1e-5  # of σ_max: below, the Gram matrix no longer tells left vectors apart (ε₆₄/1e-5² ≈ 2e-6)
_BLOCK = 192  # columns of the Gram matrix that are computed together, from the diagonal down
_WELL_CONDITIONED = 0.03**2  # of the largest eigenvalue: if all are above, Wv/σ in float32 is orthonormal to about 1e-6
_ZERO = torch.finfo(torch.float32).eps  # of σ_max: the rounding of a float32 weight, or of a float64 one's Gram matrix
_SMALL = 64  # Gram matrices up to this size are solved in one batched call on the CPU too; a thread each would not pay


def most_precise(device: torch.device) -> torch.dtype:
    """Return float64, where a device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


class SVD(NamedTuple):
    """Hold W = u · diag(s) · vᵀ with s descending and the columns of u and v orthonormal."""

    u: Tensor  # (M, K)
    s: Tensor  # (K,)
    v: Tensor  # (N, K)

    @property
    def spectra(self) -> tuple[Tensor, ...]:
        """Return the singular values of every cut: a matrix has one."""
        return (self.s,)


class Left(NamedTuple):
    """Hold the left side of W = u · diag(s) · vᵀ, with null vectors where W has fewer columns than rows."""

    u: Tensor  # (M, M)
    s: Tensor  # (K,), descending


def numerical_rank(s_K: Tensor) -> int:
    """Return how many singular values stand above `_ZERO` of the largest."""
    return int((s_K > s_K[0] * _ZERO).sum())


@torch.no_grad()
def svd(matrices: Mapping[str, Tensor]) -> dict[str, SVD]:
    """Decompose every matrix: W = U S Vᵀ, through the eigenvectors of the smaller of WᵀW and WWᵀ in float64.

    Squaring costs half the digits, and float64 has them to spare for float32 weights; it is several times faster than
    an SVD proper. Matrices of one shape are stacked into one batched call. On a CPU large ones are spread over the
    threads, because one eigendecomposition does not keep two cores busy.

    The result is float64 for float64 matrices, else float32. The sign of each basis makes the sum of its right (for
    M < N: left) vector positive. A matrix with NaN or infinity raises `NonFiniteError` with its name.

    >>> u, s, v = svd({"layer": torch.diag(torch.tensor([1.0, 3.0, 2.0]))})["layer"]
    >>> s.tolist()
    [3.0, 2.0, 1.0]
    """
    tall = {name: each if each.shape[0] >= each.shape[1] else each.mT for name, each in matrices.items()}
    found = _solved(tall, with_left=True)
    return {n: SVD(u, s, v) if tall[n] is matrices[n] else SVD(v, s, u) for n, (s, v, u) in found.items()}


@torch.no_grad()
def left_svd(matrices: Mapping[str, Tensor]) -> dict[str, Left]:
    """Return the singular values and *all* left vectors of every matrix, which is cheaper than `svd`.

    >>> u, s = left_svd({"layer": torch.tensor([[0.0], [2.0], [0.0]])})["layer"]
    >>> u.shape, s.tolist(), u[:, 0].tolist()
    (torch.Size([3, 3]), [2.0], [0.0, 1.0, 0.0])
    """
    found = _solved({name: each.mT for name, each in matrices.items()}, with_left=False)
    return {name: Left(v, s) for name, (s, v) in found.items()}


def _solved(matrices: Mapping[str, Tensor], *, with_left: bool) -> dict[str, tuple[Tensor, ...]]:
    """Return S, V and, where it is wanted, U of every matrix; those of one shape are solved together."""
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, matrix in matrices.items():
        groups[(matrix.shape[1], matrix.shape[0], matrix.dtype, matrix.device)].append(name)
    result: dict[str, tuple[Tensor, ...]] = {}

    def solve(names: Sequence[str]) -> None:
        each = [matrices[name] for name in names]
        # Not every device has float64; such a one hands the small problem to the CPU.
        device = torch.device("cpu") if each[0].device.type == "mps" else each[0].device
        dtype = torch.float64 if each[0].dtype == torch.float64 else torch.float32
        stack_BMN = (each[0][None] if len(each) == 1 else torch.stack(each)).to(device, dtype)
        found = _solve(names, stack_BMN, with_left)
        for name, *parts in zip(names, *(part.to(each[0].device) for part in found), strict=True):
            result[name] = tuple(parts)

    tasks: list[Callable[[], None]] = []
    large = 0
    for (columns, *_, device), names in sorted(groups.items(), key=lambda item: -item[0][0]):
        alone = device.type == "cpu" and columns > _SMALL
        parts = [[name] for name in names] if alone else [names]
        tasks += [partial(solve, part) for part in parts]
        large += len(parts) * alone
    _side_by_side(tasks, threads=min(torch.get_num_threads(), large))
    return {name: result[name] for name in matrices}


def _side_by_side(tasks: Sequence[Callable[[], None]], threads: int) -> None:
    """Run independent tasks on this many threads, each task on one, the first ones first."""
    if threads < 2:
        for task in tasks:
            task()
        return
    allowed = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for future in [pool.submit(torch.no_grad()(task)) for task in tasks]:  # grad mode belongs to a thread
                future.result()
    finally:
        torch.set_num_threads(allowed)  # the workers' setting is also the default of threads yet to come


def _solve(names: Sequence[str], stack_BMN: Tensor, with_left: bool) -> tuple[Tensor, ...]:
    """Return S, all of V and, where it is wanted and M ≥ N, U by way of the N × N Gram matrices in float64."""
    dtype, rank = stack_BMN.dtype, min(stack_BMN.shape[1:])
    w_BMN, scale_B1 = stack_BMN.double(), torch.ones((), device=stack_BMN.device)
    if dtype == torch.float64:  # whose squares might overflow or vanish; those of float32 numbers fit in float64
        scale_B1 = torch.linalg.vector_norm(w_BMN, ord=torch.inf, dim=(1, 2))[:, None]
        scale_B1 = torch.where(scale_B1 > 0, scale_B1, 1.0)
        w_BMN = w_BMN / scale_B1[:, None]
    gram_BNN = _lower_gram(w_BMN)
    is_finite_B = gram_BNN.diagonal(dim1=-2, dim2=-1).sum(-1).isfinite()  # Σw²: finite where every weight is
    for place in (~is_finite_B).nonzero().flatten().tolist():
        check_finite(names[place], stack_BMN[place])
    eigenvalues_BN, v_BNN = torch.linalg.eigh(gram_BNN)
    v_BNN = v_BNN.flip(-1)
    v_BNN *= torch.where(v_BNN.sum(dim=-2, keepdim=True) < 0, -1.0, 1.0)

    is_easy = (eigenvalues_BN[:, -rank] > _WELL_CONDITIONED * eigenvalues_BN[:, -1]).all()
    if is_easy and dtype == torch.float32:
        # The roots of the eigenvalues are exact to rounding here, and float32 is enough for Wv.
        s_BK, v_BNN = eigenvalues_BN.flip(-1)[:, :rank].sqrt().float(), v_BNN.float()
        return (s_BK, v_BNN, (stack_BMN @ v_BNN).div_(s_BK[:, None])) if with_left else (s_BK, v_BNN)
    u_BMN = w_BMN @ v_BNN
    # ‖Wv‖ is far more accurate than the root of an eigenvalue where σ is small, but may reorder what is nearly equal.
    s_BN = torch.linalg.vector_norm(u_BMN, dim=-2)
    if (s_BN.diff(dim=-1) > 0).any():
        s_BN, order_BN = s_BN.sort(dim=-1, descending=True, stable=True)
        v_BNN, u_BMN = (torch.take_along_dim(each, order_BN[:, None], dim=-1) for each in (v_BNN, u_BMN))
    found = (s_BN * scale_B1)[:, :rank].to(dtype), v_BNN.to(dtype)
    if not with_left:
        return found
    u_BMN.div_(torch.where(s_BN > 0, s_BN, 1.0)[:, None])
    for u_MN, s_N in zip(u_BMN, s_BN, strict=True):
        if s_N[-1] <= _GRAM_FLOOR * s_N[0]:
            # The orthonormal columns nearest in order: what W tells of a left vector is kept, the rest filled in.
            q_MN, r_NN = torch.linalg.qr(u_MN)
            u_MN.copy_(q_MN * torch.where(r_NN.diagonal() < 0, -1.0, 1.0))
    return (*found, u_BMN.to(dtype))


def _lower_gram(w_BMN: Tensor) -> Tensor:
    """Return WᵀW, only its lower triangle right: an eigendecomposition reads no more, and it is half the work."""
    columns = w_BMN.shape[-1]
    gram_BNN = w_BMN.new_empty(len(w_BMN), columns, columns)
    for start in range(0, columns, _BLOCK):
        block = slice(start, start + _BLOCK)
        torch.matmul(w_BMN[:, :, start:].mT, w_BMN[:, :, block], out=gram_BNN[:, start:, block])
    return gram_BNN


def check_finite(name: str, matrix: Tensor) -> None:
    """Raise `NonFiniteError` with the layer's name where a weight holds NaN or infinity."""
    if not torch.isfinite(matrix).all():
        text = f"layer '{name}': its weight holds NaN or infinity; allowed: finite numbers"
        raise NonFiniteError.about("weight", None, "finite numbers", text, layer=name)


def project(w_MN: Tensor, kept: SVD) -> SVD:
    """Return W along bases that were kept from an earlier W: σ_i = ‖W v_i‖, u_i = W v_i / σ_i, sorted by σ again.

    With these, u_r · diag(s_r) · v_rᵀ = W V_r V_rᵀ is W projected onto the kept bases. It is the SVD itself where the
    bases are W's own. A wide matrix (M < N) is projected from the left, onto its u: the side whose bases span all.
    """
    if w_MN.shape[0] < w_MN.shape[1]:
        u, s, v = _along(w_MN.mT, kept.u)
        return SVD(v, s, u)
    return _along(w_MN, kept.v)


def project_left(w_MN: Tensor, kept: Left) -> Left:
    """Return the same for left vectors alone."""
    _, s_M, u_MM = _along(w_MN.mT, kept.u)
    return Left(u_MM, s_M[: len(kept.s)])


def _along(w_MN: Tensor, kept_NK: Tensor) -> SVD:
    v_NK = kept_NK.to(w_MN.device)
    wv_MK = w_MN.to(v_NK.dtype) @ v_NK
    s_K, order_K = torch.linalg.vector_norm(wv_MK, dim=0).sort(descending=True, stable=True)
    return SVD(wv_MK[:, order_K] / torch.where(s_K > 0, s_K, 1.0), s_K, v_NK[:, order_K])


class CutFrom(torch.autograd.Function):
    """Lead the gradient of factors back to the weight that they were cut from: its bases are a function of it.

    ``CutFrom.apply(weight, factors, gradient)`` takes factors that nothing else holds and that have no graph;
    ``gradient(*of_factors)`` returns ∂L/∂W.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, factors: tuple[Tensor, ...], gradient: Callable[..., Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the factors, of the weight's type."""
        ctx.gradient, ctx.dtype = gradient, weight.dtype
        return tuple(each.to(weight.dtype) for each in factors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *of_factors: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the weight."""
        with torch.autocast(of_factors[0].device.type, enabled=False):
            return ctx.gradient(*of_factors).to(ctx.dtype), None, None


def truncate(w_MN: Tensor, decomposition: SVD, rank: int, added_gap: float = 0.0) -> tuple[Tensor, ...]:
    """Return the factors P = U_r and Q = S_r V_rᵀ of the rank-r approximation W̃ = P Q, differentiable in W.

    With G = ∂L/∂W̃, whether P and Q are multiplied or applied one after the other, ∂L/∂P = G V_r S_r and ∂L/∂Q = U_rᵀ G,
    and that is all of G that the gradient depends on. Bases with σ = 0 (to rounding) are left out whatever `rank` says:
    which null vectors an SVD returns is arbitrary (docs/method.md derives the gradient there).

    >>> w = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    >>> p, q = truncate(w, svd({"w": w})["w"], rank=2)
    >>> p.shape, q.shape
    (torch.Size([5, 2]), torch.Size([2, 3]))
    """
    u_MK, s_K, v_NK = decomposition
    rank = max(1, min(rank, numerical_rank(s_K)))
    s_R, dtype = s_K[:rank], s_K.dtype

    def gradient(grad_p_MR: Tensor, grad_q_RN: Tensor) -> Tensor:
        # A division by σ > 0 is exact to rounding, however small σ is; σ = 0 is left only where W itself is 0.
        is_zero_R = s_R < torch.finfo(dtype).tiny
        g_v_MR = torch.where(is_zero_R, 0.0, grad_p_MR.to(dtype) / torch.where(is_zero_R, 1.0, s_R))
        ut_g_RN = torch.where(is_zero_R[:, None], 0.0, grad_q_RN.to(dtype))
        return truncation_gradient(decomposition, g_v_MR, ut_g_RN, added_gap)

    p_MR, q_RN = CutFrom.apply(w_MN, (u_MK[:, :rank].clone(), s_R[:, None] * v_NK[:, :rank].mT), gradient)
    return p_MR, q_RN


def truncation_gradient(decomposition: SVD, g_v_MR: Tensor, ut_g_RN: Tensor, added_gap: float = 0.0) -> Tensor:
    """Return ∇ = ∂L/∂W from G V_r and U_rᵀ G, where G = ∂L/∂W̃ (appendix A, equation 5 and the three lines below it).

    With tilde for the r kept and bar for the other bases, A = Ṽᵀ Gᵀ Ū, B = Ũᵀ G V̄ and ρ_ij = σ_j/σ_i clipped at δ,

        ∇ = G Ṽ Ṽᵀ + Ũ (K₁ ⊙ A + K₂ ⊙ B) V̄ᵀ + Ū (K₃ ⊙ A + K₁ ⊙ B)ᵀ Ṽᵀ
        K₁ = ρ/(1 − ρ²),  K₂ = 1/(1 − ρ²),  K₃ = ρ²/(1 − ρ²).

    The paper writes it for M ≥ N, where V̄V̄ᵀ = I − ṼṼᵀ. Since K₂ = 1 + K₃, the 1 can be summed in closed form,

        Ũ B V̄ᵀ = Ũ Ũᵀ G (I − Ṽ Ṽᵀ),

    which makes the expression symmetric in rows and columns, valid for M < N as it stands, and cheaper. With an added
    gap ε, 1/(σ_i² − σ_k² + ε) takes the place of the clipped 1/(σ_i² − σ_k²) in K₁ and K₃.
    """
    u_MK, s_K, v_NK = decomposition
    rank = g_v_MR.shape[1]
    u_MR, u_MT, v_NR = u_MK[:, :rank], u_MK[:, rank:], v_NK[:, :rank]
    s_R1, s_1T = s_K[:rank, None], s_K[None, rank:]
    if added_gap:
        gaps_RT = s_R1.square() - s_1T.square() + added_gap
        k1_RT, k3_RT = s_R1 * s_1T / gaps_RT, s_1T.square() / gaps_RT
    else:
        rho_RT = (s_1T / torch.where(s_R1 > 0, s_R1, 1.0)).clamp(max=RHO_MAX)
        k1_RT, k3_RT = (factor / (1 - rho_RT.square()) for factor in (rho_RT, rho_RT.square()))

    ut_g_v_RK = ut_g_RN @ v_NK
    a_RT, b_RT = g_v_MR.mT @ u_MT, ut_g_v_RK[:, rank:]
    left_MR = g_v_MR + u_MT @ (k3_RT * a_RT + k1_RT * b_RT).mT
    right_RN = ut_g_RN + torch.cat([-ut_g_v_RK[:, :rank], k1_RT * a_RT + k3_RT * b_RT], dim=1) @ v_NK.mT
    return torch.cat([left_MR, u_MR], dim=1) @ torch.cat([v_NR.mT, right_RN])


def projection_gradient(left: Left, ut_grad_RT: Tensor, added_gap: float = 0.0) -> Tensor:
    """Return Z (M × M, symmetric) with ∂L/∂W = Z W, where L depends on W by the projection P = U_r U_rᵀ alone.

    With i kept and k dropped, Z = U X Uᵀ with X_ik = X_ki = x_ik / (σ_i² (1 − ρ²)), ρ = σ_k/σ_i clipped as above, and 0
    elsewhere. Here x is `ut_grad_RT`, the kept rows and dropped columns of Uᵀ(∂L/∂P + (∂L/∂P)ᵀ)U; a gap is as above.

    All M vectors take part: a dropped one with σ_k = 0 adds nothing to W, but the kept ones may turn to it. A kept one
    with σ_i = 0 has no direction of its own, and contributes nothing (docs/method.md).
    """
    rank = len(ut_grad_RT)
    s_M = torch.nn.functional.pad(left.s, (0, len(left.u) - len(left.s)))
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
