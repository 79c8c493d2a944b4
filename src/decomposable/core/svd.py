"""The decomposition W = U S Vᵀ, and truncation to rank r with the paper's clipped gradient (appendix A).

Everything that has to be decided about an SVD is decided here and nowhere else: precision, order, sign, what a zero
singular value means, and how close two singular values may come before the gradient is clipped.

Shape suffixes: B stacked matrices; M, N rows and columns; K = min(M, N), the full rank; R the kept rank; T = K − R the
bases that were cut off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

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
    """Float64, where a device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


class SVD(NamedTuple):
    """W = u · diag(s) · vᵀ with s descending and the columns of u and v orthonormal."""

    u: Tensor  # (M, K)
    s: Tensor  # (K,)
    v: Tensor  # (N, K)

    @property
    def spectra(self) -> tuple[Tensor, ...]:
        """The singular values of the one cut that a matrix has."""
        return (self.s,)

    @property
    def numerical_rank(self) -> int:
        """How many singular values stand above `_ZERO` of the largest."""
        return numerical_rank(self.s)


class Left(NamedTuple):
    """The left side of W = u · diag(s) · vᵀ, all of it: where W has fewer columns than rows, null vectors, too."""

    u: Tensor  # (M, M)
    s: Tensor  # (K,), K = min(M, N), descending


def numerical_rank(s_K: Tensor) -> int:
    """How many singular values stand above `_ZERO` of the largest."""
    return int((s_K > s_K[0] * _ZERO).sum()) if len(s_K) else 0


@torch.no_grad()
def svd(matrices: Mapping[str, Tensor]) -> dict[str, SVD]:
    """Decompose every matrix: W = U S Vᵀ, through the eigenvectors of the smaller of WᵀW and WWᵀ in float64.

    Squaring costs half the digits, and float64 has them to spare for float32 weights; it is several times faster than
    an SVD proper. Matrices of one shape are stacked into one batched call; on a CPU the stack is spread over the
    threads, a matrix each, because one eigendecomposition does not keep two cores busy.

    The result is float64 for float64 matrices, else float32. The sign of each basis is fixed by making the sum of its
    right (for M < N: left) vector positive. A matrix with NaN or infinity raises `NonFiniteError` with its name.

    >>> u, s, v = svd({"layer": torch.diag(torch.tensor([1.0, 3.0, 2.0]))})["layer"]
    >>> s.tolist()
    [3.0, 2.0, 1.0]
    """
    return _in_groups(
        matrices, {name: (min(each.shape), max(each.shape)) for name, each in matrices.items()}, _svd_into
    )


@torch.no_grad()
def left_svd(matrices: Mapping[str, Tensor]) -> dict[str, Left]:
    """Singular values and *all* left vectors of every matrix, through the eigenvectors of WWᵀ in float64.

    For what depends on the left side alone, which is cheaper. Types, signs and failures are as in `svd`.

    >>> u, s = left_svd({"layer": torch.tensor([[0.0], [2.0], [0.0]])})["layer"]
    >>> u.shape, s.tolist(), u[:, 0].tolist()
    (torch.Size([3, 3]), [2.0], [0.0, 1.0, 0.0])
    """
    return _in_groups(matrices, {name: tuple(each.shape) for name, each in matrices.items()}, _left_into)


Found = TypeVar("Found")


def _in_groups(
    matrices: Mapping[str, Tensor],
    sizes: Mapping[str, tuple[int, ...]],
    solve_into: Callable[[dict[str, Found], Mapping[str, Tensor]], None],
) -> dict[str, Found]:
    """Solve those of one size together; the first number of a size is that of the eigenproblem's rows."""
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, matrix in matrices.items():
        groups[(*sizes[name], matrix.dtype, matrix.device)].append(name)

    tasks: list[Callable[[], None]] = []
    large = 0
    result: dict[str, Found] = {}
    for (rows, *_, device), names in sorted(groups.items(), key=lambda item: -item[0][0]):
        alone = device.type == "cpu" and rows > _SMALL
        for part in [[name] for name in names] if alone else [names]:
            tasks.append(partial(solve_into, result, {name: matrices[name] for name in part}))
            large += alone
    _side_by_side(tasks, threads=min(torch.get_num_threads(), large))
    return {name: result[name] for name in matrices}


def check_finite(name: str, matrix: Tensor) -> None:
    """Raise `NonFiniteError` with the layer's name where a weight holds NaN or infinity."""
    if not torch.isfinite(matrix).all():
        raise _non_finite(name)


def _non_finite(name: str) -> NonFiniteError:
    return NonFiniteError(f"layer '{name}': its weight holds NaN or infinity; only finite weights decompose")


def _svd_into(result: dict[str, SVD], matrices: Mapping[str, Tensor]) -> None:
    """SVD of matrices that share a shape up to transposition, in one batched call."""
    names, device = list(matrices), next(iter(matrices.values())).device
    found = _tall_svd(names, _stacked([m if m.shape[0] >= m.shape[1] else m.mT for m in matrices.values()]))
    for name, u, s, v in zip(names, *(t.to(device) for t in found), strict=True):
        is_tall = matrices[name].shape[0] >= matrices[name].shape[1]
        result[name] = SVD(u, s, v) if is_tall else SVD(v, s, u)


def _left_into(result: dict[str, Left], matrices: Mapping[str, Tensor]) -> None:
    """The left sides of matrices that share a shape, in one batched call."""
    names, device = list(matrices), next(iter(matrices.values())).device
    stack_BMN = _stacked(list(matrices.values()))
    _, rows, columns = stack_BMN.shape
    rank = min(rows, columns)
    w_BNM, scale_B11, eigenvalues_BM, u_BMM = _eigenvectors(names, stack_BMN.mT)
    is_easy = (eigenvalues_BM[:, rows - rank] > _WELL_CONDITIONED * eigenvalues_BM[:, -1]).all()
    if is_easy and stack_BMN.dtype == torch.float32:
        s_BM = eigenvalues_BM.flip(-1).clamp_min(0).sqrt()
    else:
        s_BM = torch.linalg.vector_norm(w_BNM @ u_BMM, dim=-2)
        s_BM, order_BM = s_BM.sort(dim=-1, descending=True, stable=True)
        u_BMM = torch.take_along_dim(u_BMM, order_BM[:, None, :], dim=-1)
    s_BM = s_BM if scale_B11 is None else s_BM * scale_B11[:, 0]
    found = (u_BMM.to(stack_BMN.dtype), s_BM[:, :rank].to(stack_BMN.dtype))
    for name, u, s in zip(names, *(t.to(device) for t in found), strict=True):
        result[name] = Left(u, s)


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """As one tensor, of the type that comes out, where the problem is solved."""
    first = matrices[0]
    # Not every device has float64; such a one hands the small problem to the CPU.
    device = torch.device("cpu") if first.device.type == "mps" else first.device
    out_dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    return (first[None] if len(matrices) == 1 else torch.stack(list(matrices))).to(device, out_dtype)


def _eigenvectors(names: Sequence[str], stack_BMN: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """W in float64, what it was divided by, the eigenvalues of WᵀW in rising order and its vectors in falling order."""
    scale_B11 = _scale(stack_BMN)
    w_BMN = stack_BMN.double() if scale_B11 is None else stack_BMN / scale_B11
    gram_BNN = _lower_gram(w_BMN)
    is_finite_B = gram_BNN.diagonal(dim1=-2, dim2=-1).sum(-1).isfinite()  # Σw²: finite where every weight is
    if not is_finite_B.all():
        raise _non_finite(names[is_finite_B.tolist().index(False)])
    eigenvalues_BN, v_BNN = torch.linalg.eigh(gram_BNN)
    v_BNN = v_BNN.flip(-1)
    v_BNN *= torch.where(v_BNN.sum(dim=-2, keepdim=True) < 0, -1.0, 1.0)
    return w_BMN, scale_B11, eigenvalues_BN, v_BNN


def _tall_svd(names: Sequence[str], stack_BMN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SVD of stacked matrices with M ≥ N by way of their N × N Gram matrices in float64."""
    w_BMN, scale_B11, eigenvalues_BK, v_BNK = _eigenvectors(names, stack_BMN)
    is_easy = (eigenvalues_BK[:, 0] > _WELL_CONDITIONED * eigenvalues_BK[:, -1]).all()
    if is_easy and stack_BMN.dtype == torch.float32:
        # The roots of the eigenvalues are exact to rounding here, and float32 is enough for Wv.
        s_BK, v_BNK = eigenvalues_BK.flip(-1).sqrt().float(), v_BNK.float()
        return (stack_BMN @ v_BNK).div_(s_BK[:, None, :]), s_BK, v_BNK
    u_BMK = w_BMN @ v_BNK
    # ‖Wv‖ is far more accurate than the root of an eigenvalue where σ is small, but may reorder what is nearly equal.
    s_BK = torch.linalg.vector_norm(u_BMK, dim=-2)
    if (s_BK.diff(dim=-1) > 0).any():
        s_BK, order_BK = s_BK.sort(dim=-1, descending=True, stable=True)
        v_BNK, u_BMK = (torch.take_along_dim(t, order_BK[:, None, :], dim=-1) for t in (v_BNK, u_BMK))
    u_BMK.div_(torch.where(s_BK > 0, s_BK, 1.0)[:, None, :])
    for b in range(len(u_BMK)):
        if s_BK[b, -1] <= _GRAM_FLOOR * s_BK[b, 0]:
            u_BMK[b] = _orthonormalised(u_BMK[b])
    s_BK = s_BK if scale_B11 is None else s_BK * scale_B11[:, 0]
    return u_BMK.to(stack_BMN.dtype), s_BK.to(stack_BMN.dtype), v_BNK.to(stack_BMN.dtype)


def _scale(w_BMN: Tensor) -> Tensor | None:
    """The largest magnitude, by which float64 matrices are divided so that their squares neither overflow nor vanish;
    the squares of float32 numbers fit in float64.
    """
    if w_BMN.dtype == torch.float32:
        return None
    low_B, high_B = w_BMN.flatten(1).aminmax(dim=1)
    scale_B = torch.maximum(-low_B, high_B)
    return torch.where(scale_B > 0, scale_B, 1.0)[:, None, None]


def _lower_gram(w_BMN: Tensor) -> Tensor:
    """WᵀW, of which only the lower triangle is right: an eigendecomposition reads no more, and it is half the work."""
    columns = w_BMN.shape[-1]
    gram_BNN = w_BMN.new_empty(len(w_BMN), columns, columns)
    for start in range(0, columns, _BLOCK):
        block = slice(start, start + _BLOCK)
        torch.matmul(w_BMN[:, :, start:].mT, w_BMN[:, :, block], out=gram_BNN[:, start:, block])
    return gram_BNN


def _orthonormalised(u_MK: Tensor) -> Tensor:
    """The orthonormal columns nearest in order to u's: what W tells of a left vector is kept, the rest filled in."""
    q_MK, r_KK = torch.linalg.qr(u_MK)
    return q_MK * torch.where(r_KK.diagonal() < 0, -1.0, 1.0)


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


def project(w_MN: Tensor, kept: SVD) -> SVD:
    """W along bases that were kept from an earlier W: σ_i = ‖W v_i‖, u_i = W v_i / σ_i, sorted by σ again.

    With these, u_r · diag(s_r) · v_rᵀ = W V_r V_rᵀ is W projected onto the kept bases. It is the SVD itself where the
    bases are W's own. A wide matrix (M < N) is projected from the left, onto its u: the side whose bases span all.
    """
    if w_MN.shape[0] < w_MN.shape[1]:
        flipped = project(w_MN.mT, SVD(kept.v, kept.s, kept.u))
        return SVD(flipped.v, flipped.s, flipped.u)
    v_NK = kept.v.to(w_MN.device, kept.s.dtype)
    wv_MK = w_MN.to(v_NK.dtype) @ v_NK
    s_K, order_K = torch.linalg.vector_norm(wv_MK, dim=0).sort(descending=True, stable=True)
    return SVD(wv_MK[:, order_K] / torch.where(s_K > 0, s_K, 1.0), s_K, v_NK[:, order_K])


def project_left(w_MN: Tensor, kept: Left) -> Left:
    """The same for left vectors alone: σ_i = ‖Wᵀu_i‖, sorted again."""
    u_MM = kept.u.to(w_MN.device)
    s_M = torch.linalg.vector_norm(u_MM.mT @ w_MN.to(u_MM.dtype), dim=1)
    s_M, order_M = s_M.sort(descending=True, stable=True)
    return Left(u_MM[:, order_M], s_M[: len(kept.s)])


def truncate(w_MN: Tensor, decomposition: SVD, rank: int, added_gap: float = 0.0) -> tuple[Tensor, Tensor]:
    """The factors P = U_r and Q = S_r V_rᵀ of the rank-r approximation W̃ = P Q, differentiable in W.

    The gradient is appendix A's, with ρ clipped at δ = √0.99, or, where a gap is given, with σ_i² − σ_k² made larger by
    that constant, which is what the paper compares its clipping with. Whatever is computed from P and Q, be it P Q
    itself or a layer that applies one after the other, ∂L/∂P = G V_r S_r and ∂L/∂Q = U_rᵀ G with G = ∂L/∂W̃, and that
    is all of G that the gradient depends on.

    Bases with σ = 0 (to rounding) are left out whatever `rank` says: they add nothing to W̃, and which null vectors an
    SVD returns is arbitrary, so that no gradient is to be had from them (docs/method.md derives what is).

    >>> w = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    >>> p, q = truncate(w, svd({"w": w})["w"], rank=2)
    >>> p.shape, q.shape
    (torch.Size([5, 2]), torch.Size([2, 3]))
    """
    rank = max(1, min(rank, decomposition.numerical_rank))
    p_MR, q_RN = _Truncate.apply(w_MN, *decomposition, rank, added_gap)
    return p_MR, q_RN


class _Truncate(torch.autograd.Function):
    """(W, its SVD, r) → (U_r, S_r V_rᵀ), with the gradient for W only: the SVD is a function of W already."""

    @staticmethod
    def forward(
        ctx: Any, w_MN: Tensor, u_MK: Tensor, s_K: Tensor, v_NK: Tensor, rank: int, added_gap: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(u_MK, s_K, v_NK)
        ctx.rank, ctx.dtype, ctx.added_gap = rank, w_MN.dtype, added_gap
        q_RN = s_K[:rank, None] * v_NK[:, :rank].mT
        return u_MK[:, :rank].to(w_MN.dtype, copy=True), q_RN.to(w_MN.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_p_MR: Tensor, grad_q_RN: Tensor) -> tuple[Tensor | None, ...]:
        decomposition = SVD(*ctx.saved_tensors)
        s_R, dtype = decomposition.s[: ctx.rank], decomposition.s.dtype
        with torch.autocast(s_R.device.type, enabled=False):
            # A division by σ > 0 is exact to rounding, however small σ is; σ = 0 is left only where W itself is 0.
            is_zero_R = s_R < torch.finfo(dtype).tiny
            g_v_MR = torch.where(is_zero_R, 0.0, grad_p_MR.to(dtype) / torch.where(is_zero_R, 1.0, s_R))
            ut_g_RN = torch.where(is_zero_R[:, None], 0.0, grad_q_RN.to(dtype))
            grad_w_MN = truncation_gradient(decomposition, g_v_MR, ut_g_RN, ctx.added_gap)
        return grad_w_MN.to(ctx.dtype), None, None, None, None, None


def truncation_gradient(decomposition: SVD, g_v_MR: Tensor, ut_g_RN: Tensor, added_gap: float = 0.0) -> Tensor:
    """∇ = ∂L/∂W from G V_r and U_rᵀ G, where G = ∂L/∂W̃ (appendix A, equation 5 and the three lines below it).

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
