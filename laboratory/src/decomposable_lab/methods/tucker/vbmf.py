"""The rank of a noisy matrix by empirical variational Bayesian matrix factorisation (VBMF), in closed form.

The model is V = B Aᵀ + noise with independent Gaussian entries of variance σ², Gaussian priors on A and B whose
variances are estimated too, and a posterior that is taken to factorise into one for A and one for B. The matrix has L
rows and M ≥ L columns (else it is transposed), singular values γ_1 ≥ … ≥ γ_L, and α = L/M. Then the global minimum of
the free energy is known:

    S. Nakajima, M. Sugiyama, S. D. Babacan, R. Tomioka: Global analytic solution of fully-observed variational Bayesian
    matrix factorization, JMLR 14, 2013
    S. Nakajima, R. Tomioka, M. Sugiyama, S. D. Babacan: Perfect dimensionality recovery by variational Bayesian PCA,
    NIPS 2012

A singular value is kept where it is above a threshold that depends on the noise, and shrunk:

    γ̂ = γ/2 · (1 − (L+M)σ²/γ² + √((1 − (L+M)σ²/γ²)² − 4LMσ⁴/γ⁴))   for γ > √(Mσ²(1+τ̄)(1+α/τ̄)), else 0,

with τ̄ ≈ 2.5129 √α the zero of Φ(τ) + Φ(τ/α), where Φ(z) = log(1+z)/z − 1/2. The rank is the number of values kept.

The noise variance is the minimum of the free energy, a function of σ² alone (up to a factor and a constant)

    Ω(σ²) = Σ_h ψ(γ_h²/(Mσ²)),   ψ(x) = x − log x + [x > x̄] · (log(1+τ(x)) + α log(1+τ(x)/α) − τ(x))
    τ(x) = ½ (x − (1+α) + √((x − (1+α))² − 4α)),   x̄ = (1+τ̄)(1+α/τ̄)

between bounds that are known as well. It has several local minima: every γ that rises above the threshold adds a bend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decomposable_edge.errors import InvalidArgumentError, NonFiniteError

Floats = NDArray[np.float64]

_GRID = 256  # points between the bounds, besides one between every two bends
_MINIMA = 8  # of the lowest grid points that are minima among their neighbours, searched further
_ZERO = float(np.finfo(np.float64).eps)  # times the longer side: below this part of the largest, a value is zero


@dataclass(frozen=True, kw_only=True, eq=False)
class VBMF:
    """Hold what VBMF says about a matrix.

    Attributes:
        rank: the number of singular values that are more than noise.
        values: all singular values, descending: the first `rank` of them shrunk to γ̂, the others 0.
        noise_variance: σ², of one entry.
        threshold: the singular value above which they are kept.
    """

    rank: int
    values: Floats
    noise_variance: float
    threshold: float


def vbmf(matrix: Any) -> VBMF:
    """Compute VBMF of a matrix.

    >>> generator = np.random.default_rng(0)
    >>> signal = generator.normal(size=(40, 3)) @ generator.normal(size=(3, 90))
    >>> found = vbmf(signal + 0.1 * generator.normal(size=(40, 90)))
    >>> found.rank, round(found.noise_variance ** 0.5, 2)
    (3, 0.1)
    """
    v_LM = np.asarray(matrix, dtype=np.float64)
    if v_LM.ndim != 2:
        raise InvalidArgumentError(f"vbmf: got an array of {v_LM.ndim} axes; allowed: a matrix")
    if not np.isfinite(v_LM).all():
        raise NonFiniteError("vbmf: the matrix holds NaN or infinity; allowed: finite numbers")
    if not v_LM.size:
        raise InvalidArgumentError(f"vbmf: got a matrix of shape {v_LM.shape}; allowed: at least one row and column")
    return vbmf_of_values(np.linalg.svd(v_LM, compute_uv=False).astype(np.float64), v_LM.shape)


def vbmf_rank(singular_values: Sequence[float] | Floats, shape: Sequence[int]) -> int:
    """Return the rank that VBMF gives a matrix of this shape with these singular values.

    >>> vbmf_rank([9.0, 8.0, 1.1, 1.0, 1.0, 0.9, 0.9, 0.8], (8, 12))
    2
    """
    return vbmf_of_values(singular_values, shape).rank


def vbmf_of_values(singular_values: Sequence[float] | Floats, shape: Sequence[int]) -> VBMF:
    """Compute VBMF of a matrix of this shape from its singular values; those not given are 0.

    The estimate has at most ⌈L/(1+α)⌉ − 1 values, however large the last ones are: the free energy always takes part of
    the spectrum for noise. Where no more than these are above 0, it falls without bound towards σ² = 0, so the matrix
    has no noise, and its rank is the number of them.
    """
    gamma_L, columns = _checked(singular_values, shape)
    rows = len(gamma_L)
    scale = float(gamma_L[0])
    if scale == 0:
        return VBMF(rank=0, values=gamma_L, noise_variance=0.0, threshold=0.0)
    gamma_L = gamma_L / scale
    gamma_L[gamma_L <= _ZERO * columns] = 0.0
    most = _most(rows, columns)
    if gamma_L[most] == 0:
        return VBMF(rank=int((gamma_L > 0).sum()), values=gamma_L * scale, noise_variance=0.0, threshold=0.0)
    noise = _noise_variance(gamma_L, columns)
    threshold = math.sqrt(columns * noise * bend(rows / columns))
    # At the lower bound of σ² a value lies on its threshold, where rounding must not decide.
    rank = min(most, int((gamma_L > threshold).sum()))
    values_L = np.zeros(rows)
    values_L[:rank] = shrunk(gamma_L[:rank], rows, columns, noise)
    return VBMF(rank=rank, values=values_L * scale, noise_variance=noise * scale**2, threshold=threshold * scale)


def _checked(singular_values: Sequence[float] | Floats, shape: Sequence[int]) -> tuple[Floats, int]:
    """Return all L singular values, descending, and M."""
    if len(shape) != 2 or min(shape) < 1:
        raise InvalidArgumentError(f"shape={tuple(shape)}; allowed: two numbers of at least 1")
    given = np.asarray(singular_values, dtype=np.float64)
    if given.ndim != 1 or len(given) > min(shape):
        raise InvalidArgumentError(
            f"singular_values: {given.size} of {given.ndim} axes for a {shape[0]} × {shape[1]} matrix; "
            f"allowed: a list of at most {min(shape)}"
        )
    if not np.isfinite(given).all():
        raise NonFiniteError("singular_values: they hold NaN or infinity; allowed: finite numbers")
    if (given < 0).any():
        raise InvalidArgumentError(f"singular_values: the least is {given.min():g}; allowed: numbers of at least 0")
    gamma_L = np.zeros(min(shape))
    gamma_L[: len(given)] = np.sort(given)[::-1]
    return gamma_L, max(shape)


def _most(rows: int, columns: int) -> int:
    """⌈L/(1+α)⌉ − 1 in integers: the largest number below LM/(L+M)."""
    return (rows * columns - 1) // (rows + columns)


def shrunk(gamma: Floats, rows: int, columns: int, noise_variance: float) -> Floats:
    """Return γ̂ of values above the threshold."""
    kept = 1 - (rows + columns) * noise_variance / gamma**2
    return gamma / 2 * (kept + np.sqrt(kept**2 - 4 * rows * columns * noise_variance**2 / gamma**4))


def bend(alpha: float) -> float:
    """Return x̄ = (1+τ̄)(1+α/τ̄): the threshold, as γ²/(Mσ²)."""
    tau = least_tau(alpha)
    return (1 + tau) * (1 + alpha / tau)


def least_tau(alpha: float) -> float:
    """Return τ̄, where Φ(τ) + Φ(τ/α) falls through 0.

    >>> round(least_tau(1.0), 4)
    2.5129
    """

    def phi(z: float) -> float:
        return math.log1p(z) / z - 0.5

    low, high = math.log(math.sqrt(alpha)), math.log(10 * math.sqrt(alpha))
    for _ in range(60):
        middle = (low + high) / 2
        tau = math.exp(middle)
        low, high = (middle, high) if phi(tau) + phi(tau / alpha) > 0 else (low, middle)
    return math.exp((low + high) / 2)


def _noise_variance(gamma_L: Floats, columns: int) -> float:
    """The global minimum of Ω: a grid over log σ² that has a point between every two bends, then a golden section.

    Bounds: max(γ²_{H+1}/(Mx̄), Σ_{h>H} γ_h²/(M(L−H))) ≤ σ² ≤ Σ γ_h²/(LM) with H = ⌈L/(1+α)⌉ − 1.
    """
    rows = len(gamma_L)
    alpha, most = rows / columns, _most(rows, columns)
    squares_L = gamma_L**2 / columns
    bends_L = squares_L / bend(alpha)
    low, high = math.log(max(bends_L[most], squares_L[most:].mean())), math.log(squares_L.mean())
    if high <= low:
        return math.exp(high)

    def omega(log_variance: float) -> float:
        return _free_energy(squares_L, log_variance, alpha)

    bends = np.log(bends_L[bends_L > 0])
    between = (bends[1:] + bends[:-1]) / 2
    between = between[(between > low) & (between < high)]
    grid = np.unique(np.concatenate([np.linspace(low, high, _GRID), between]))
    energies = np.array([omega(point) for point in grid])
    padded = np.concatenate([[np.inf], energies, [np.inf]])
    minima = np.flatnonzero((energies <= padded[:-2]) & (energies <= padded[2:]))
    lowest = [int(i) for i in minima[np.argsort(energies[minima], kind="stable")][:_MINIMA]]
    last = len(grid) - 1
    found = [_golden_section(omega, grid[max(i - 1, 0)], grid[min(i + 1, last)]) for i in lowest]
    return math.exp(min(found, key=omega))


def _free_energy(squares_L: Floats, log_variance: float, alpha: float) -> float:
    """Ω without Σ log γ², which does not depend on σ².

    x − τ(x) is taken from x = (1+τ)(1+α/τ), as 1 + α + α/τ: both are huge where there is next to no noise.
    """
    x_L = squares_L * math.exp(-log_variance)
    is_kept_L = x_L > bend(alpha)
    excess_K = x_L[is_kept_L] - (1 + alpha)
    tau_K = (excess_K + np.sqrt(excess_K**2 - 4 * alpha)) / 2
    kept_K = 1 + alpha + alpha / tau_K + np.log1p(tau_K) + alpha * np.log1p(tau_K / alpha)
    return float(x_L[~is_kept_L].sum() + kept_K.sum()) + len(x_L) * log_variance


def _golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the place of a minimum between two points, to the square root of the machine's precision."""
    shrink = (math.sqrt(5) - 1) / 2
    left, right = high - shrink * (high - low), low + shrink * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-9:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - shrink * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + shrink * (high - low)
            at_right = function(right)
    # An end of the interval may be lower than all of its inside.
    return min((low, (low + high) / 2, high), key=function)
