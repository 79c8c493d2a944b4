import math

import numpy as np
import pytest

from decomposable_edge.errors import DecomposableError, InvalidArgumentError, NonFiniteError
from decomposable_lab.methods.tucker.vbmf import bend, least_tau, shrunk, vbmf, vbmf_of_values, vbmf_rank

SHAPES = [
    *((16, 144), (144, 16), (64, 64), (40, 200)),
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((256, 256), (128, 1152), (256, 2304))),
    (48, 96),
]


def orthonormal(generator, rows, columns):
    return np.linalg.qr(generator.normal(size=(rows, columns)))[0]


def enough(shape, rank):
    """γ*²/(Mσ²) above which the rank of a large matrix is found for certain (NIPS 2012).

    A component is visible above τ̄; besides, where a part ξ < 1/x̄ of all components is signal, none of it may pass for
    noise: (x̄ − 1)/(1 − x̄ξ) − α.
    """
    alpha, part = min(shape) / max(shape), rank / min(shape)
    assert part < 1 / bend(alpha)
    return max(least_tau(alpha), (bend(alpha) - 1) / (1 - bend(alpha) * part) - alpha)


def spiked(shape, rank, strength, noise=1.0, seed=0):
    """A matrix whose signal has singular values with γ*²/(Mσ²) = strength · enough, plus noise of that deviation."""
    generator = np.random.default_rng(seed)
    value = noise * math.sqrt(strength * enough(shape, rank) * max(shape))
    signal = value * orthonormal(generator, shape[0], rank) @ orthonormal(generator, shape[1], rank).T
    return signal + noise * generator.normal(size=shape)


def free_energy(gamma, rows, columns, variance):
    """Twice the free energy at the best posterior, component by component: JMLR 2013, without any threshold.

    A component costs M log(1 + γγ̂/(Mσ²)) + L log(1 + γγ̂/(Lσ²)) − γγ̂/σ² where it is switched on, 0 where it is off.
    """
    total = rows * columns * math.log(2 * math.pi * variance)
    for g in gamma:
        total += g**2 / variance
        if g**2 >= (math.sqrt(rows) + math.sqrt(columns)) ** 2 * variance:
            p = 1 - (rows + columns) * variance / g**2
            on = g * g / 2 * (p + math.sqrt(max(0.0, p**2 - 4 * rows * columns * variance**2 / g**4)))
            cost = columns * math.log1p(on / (columns * variance)) + rows * math.log1p(on / (rows * variance))
            total += min(0.0, cost - on / variance)
    return total


# The rank


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("noise", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("strength", [1.5, 20.0])
def test_the_rank_is_found_where_the_signal_is_strong_enough(shape, noise, strength):
    for rank in (1, min(shape) // 8, min(shape) // 6):
        assert vbmf(spiked(shape, rank, strength, noise, seed=rank)).rank == rank


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strength", [1.5, 20.0])
def test_the_noise_variance_is_found(shape, strength):
    found = vbmf(spiked(shape, min(shape) // 8, strength, noise=0.3))
    assert found.noise_variance == pytest.approx(0.09, rel=0.08)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_noise_has_rank_0(shape):
    for seed in range(3):
        found = vbmf(np.random.default_rng(seed).normal(size=shape))
        assert found.rank == 0
        assert not found.values.any()
        assert found.noise_variance == pytest.approx(1, rel=0.06)


def test_a_signal_below_the_noise_is_not_seen():
    """Below γ*² = √α Mσ² no method can see it in a large matrix; that is 1/2.5 of τ̄ and more."""
    assert vbmf(spiked((256, 2304), 10, strength=0.2)).rank == 0


@pytest.mark.parametrize("shape", [(30, 40), (40, 30), (50, 50), (16, 400)], ids=str)
def test_without_noise_the_rank_is_exact_up_to_the_most_that_there_can_be(shape):
    generator = np.random.default_rng(0)
    most = math.ceil(min(shape) / (1 + min(shape) / max(shape))) - 1
    for rank in (1, 3, most):
        signal = generator.normal(size=(shape[0], rank)) @ generator.normal(size=(rank, shape[1]))
        found = vbmf(signal)
        assert found.rank == rank
        assert found.noise_variance == 0
        np.testing.assert_allclose(found.values, np.linalg.svd(signal, compute_uv=False), atol=1e-9)
    full = orthonormal(generator, *sorted(shape, reverse=True))
    assert vbmf(full).rank == 0  # all singular values the same: that is noise
    assert vbmf_rank(np.geomspace(1e6, 1, min(shape)), shape) <= most


def test_rounding_is_noise():
    """Nine digits below the signal: the free energy must not lose them."""
    generator = np.random.default_rng(0)
    signal = generator.normal(size=(64, 12)) @ generator.normal(size=(12, 576))
    found = vbmf(np.round(signal, 8))
    assert found.rank == 12
    assert found.noise_variance == pytest.approx(1e-16 / 12, rel=0.05)


# Odd matrices


def test_zero():
    found = vbmf(np.zeros((4, 7)))
    assert (found.rank, found.noise_variance, found.threshold) == (0, 0, 0)
    assert found.values.tolist() == [0] * 4


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (1, 1)], ids=str)
def test_one_row_cannot_be_told_from_noise(shape):
    found = vbmf(np.ones(shape))
    assert found.rank == 0
    assert found.noise_variance == pytest.approx(1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(value):
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        vbmf([[1.0, value], [0.0, 1.0]])
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        vbmf_rank([value, 1.0], (2, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vbmf(np.zeros(3)), "1 axes; allowed: a matrix"),
        (lambda: vbmf(np.zeros((0, 3))), "at least one row"),
        (lambda: vbmf_rank([1.0], (0, 3)), "at least 1"),
        (lambda: vbmf_rank([1.0, 2.0, 3.0], (2, 9)), "at most 2"),
        (lambda: vbmf_rank([1.0, -2.0], (2, 9)), "the least is -2"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(InvalidArgumentError, match=message) as error:
        call()
    assert isinstance(error.value, DecomposableError)
    assert "\n" not in str(error.value)


def test_values_that_are_not_given_are_zero_and_order_does_not_matter():
    values = [1.0, 5.0, 1.2, 0.9, 7.0, 1.1]
    shape = (12, 15)
    assert vbmf_rank(values, shape) == vbmf_rank([*sorted(values), *[0.0] * 6], shape)


# Invariance


@pytest.mark.parametrize("scale", [1e-150, 1e-12, 3.0, 1e140])
def test_the_scale_does_not_matter(scale):
    matrix = spiked((48, 96), 9, strength=3)
    one, other = vbmf(matrix), vbmf(scale * matrix)
    assert one.rank == other.rank == 9
    np.testing.assert_allclose(other.values, scale * one.values, rtol=1e-6)
    assert math.sqrt(other.noise_variance) == pytest.approx(scale * math.sqrt(one.noise_variance), rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES[:6], ids=str)
def test_transposing_does_not_matter(shape):
    matrix = spiked(shape, 5, strength=2)
    one, other = vbmf(matrix), vbmf(matrix.T)
    assert one.rank == other.rank
    assert one.noise_variance == pytest.approx(other.noise_variance, rel=1e-6)


# The formulas


@pytest.mark.parametrize("alpha", [1.0, 0.5, 1 / 9, 0.01, 0.001])
def test_the_threshold_is_where_the_free_energy_of_a_component_is_zero(alpha):
    tau = least_tau(alpha)
    assert math.log1p(tau) + alpha * math.log1p(tau / alpha) - tau == pytest.approx(0, abs=1e-9)
    # The published approximation is close in what it is for, the threshold as a singular value.
    approximate = 2.5129 * math.sqrt(alpha)
    assert math.sqrt((1 + approximate) * (1 + alpha / approximate)) == pytest.approx(math.sqrt(bend(alpha)), rel=0.02)


def by_iteration(gamma, rows, columns, variance):
    """âb̂ of one component by the updates of the variational posterior and of the prior variances, until they stay."""
    a = b = math.sqrt(gamma)
    var_a = var_b = c_a = c_b = 1.0
    for _ in range(20_000):
        var_a = variance / (b**2 + rows * var_b + variance / c_a)
        a = var_a * gamma * b / variance
        var_b = variance / (a**2 + columns * var_a + variance / c_b)
        b = var_b * gamma * a / variance
        c_a, c_b = a**2 / columns + var_a, b**2 / rows + var_b
    return a * b


@pytest.mark.parametrize(("rows", "columns"), [(16, 144), (50, 50), (3, 200)])
def test_shrunken_values_are_what_the_variational_updates_converge_to(rows, columns):
    variance = 0.7
    threshold = math.sqrt(columns * variance * bend(rows / columns))
    for factor in (1.1, 1.7, 5.0):
        gamma = factor * threshold
        closed = float(shrunk(np.array([gamma]), rows, columns, variance)[0])
        assert by_iteration(gamma, rows, columns, variance) == pytest.approx(closed, rel=1e-5)


def test_values_satisfy_the_closed_form():
    """γ̂² − (1 − (L+M)σ²/γ²) γ γ̂ + LMσ⁴/γ² = 0, the larger root, above the threshold; else 0."""
    matrix = spiked((64, 200), 11, strength=4)
    gamma, found = np.linalg.svd(matrix, compute_uv=False), vbmf(matrix)
    rows, columns, variance = 64, 200, found.noise_variance
    assert (found.values > 0).sum() == found.rank == 11
    assert (gamma[:11] > found.threshold).all()
    assert (gamma[11:] <= found.threshold).all()
    g, h = gamma[:11], found.values[:11]
    residual = h**2 - (1 - (rows + columns) * variance / g**2) * g * h + rows * columns * variance**2 / g**2
    np.testing.assert_allclose(residual / g**2, 0, atol=1e-12)
    assert (h > g / 2 * (1 - (rows + columns) * variance / g**2)).all()
    assert found.threshold == pytest.approx(math.sqrt(columns * variance * bend(rows / columns)))


def spectra():
    generator = np.random.default_rng(1)
    yield "spiked", np.linalg.svd(spiked((24, 60), 5, strength=1.5), compute_uv=False), (24, 60)
    yield "square", np.linalg.svd(spiked((30, 30), 5, strength=0.7), compute_uv=False), (30, 30)
    yield "power law", np.arange(1, 41) ** -0.7, (40, 90)
    yield "geometric", np.geomspace(1, 1e-3, 16), (16, 144)
    yield "steps", np.repeat([10.0, 5.0, 1.0, 0.1], 6), (24, 24)
    yield "heavy tails", np.linalg.svd(generator.standard_t(2.1, size=(32, 64)), compute_uv=False), (32, 64)
    yield "uniform", np.linspace(1, 0.01, 48), (48, 432)
    yield "one far above", np.array([1e4, *np.ones(11)]), (12, 30)


@pytest.mark.parametrize(("gamma", "shape"), [s[1:] for s in spectra()], ids=[s[0] for s in spectra()])
def test_the_noise_variance_is_the_global_minimum_of_the_free_energy(gamma, shape):
    """On a dense grid that knows nothing of bounds or thresholds, nothing is lower."""
    found = vbmf_of_values(gamma, shape)
    at_found = free_energy(gamma, *shape, found.noise_variance)
    mean = float((gamma**2).sum()) / (shape[0] * shape[1])
    grid = mean * np.geomspace(1e-7, 30, 8000)
    energies = np.array([free_energy(gamma, *shape, variance) for variance in grid])
    assert at_found <= energies.min() + 1e-7 * abs(at_found)
    lowest = grid[energies.argmin()]
    assert found.noise_variance == pytest.approx(lowest, rel=0.01)
    on = [g for g in gamma if free_energy([g], *shape, lowest) < free_energy([0], *shape, lowest) + g**2 / lowest]
    assert len(on) == vbmf_rank(gamma, shape)
