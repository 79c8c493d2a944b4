import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from decomposable.core.forms import matrix_form, matrix_shape, to_matrix, to_weight
from decomposable.core.svd import RHO_MAX, SVD, numerical_rank, project, svd, truncate
from decomposable_edge.errors import NonFiniteError
from refusals import refused

some_shapes = settings(deadline=None, derandomize=True, max_examples=40)
sizes = st.integers(1, 24)
seeds = st.integers(0, 1000)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed)).to(dtype)


def with_spectrum(rows: int, columns: int, sigma, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    """A matrix with these singular values and random singular vectors."""
    sigma = torch.as_tensor(sigma, dtype=torch.float64)
    u = torch.linalg.qr(random(rows, len(sigma), seed=seed)).Q
    v = torch.linalg.qr(random(columns, len(sigma), seed=seed + 1)).Q
    return (u * sigma @ v.mT).to(dtype)


def separated(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Every singular value is 0.8 of the one before: far from the clip at 0.995."""
    return with_spectrum(rows, columns, 2 * 0.8 ** np.arange(min(rows, columns)), seed)


def decompose(matrix: torch.Tensor) -> SVD:
    return svd({"layer": matrix})["layer"]


def reconstruct(found: SVD) -> torch.Tensor:
    return found.u.double() * found.s.double() @ found.v.double().mT


def assert_agrees_with_lapack(found: SVD, matrix: torch.Tensor) -> None:
    """All that is promised of a decomposition of float32 weights."""
    exact = matrix.double()
    truth = torch.linalg.svdvals(exact)
    rank = min(matrix.shape)
    assert [part.shape for part in found] == [(matrix.shape[0], rank), (rank,), (matrix.shape[1], rank)]
    assert all(torch.isfinite(part).all() for part in found)
    assert (found.s.diff() <= 0).all()
    assert (found.s >= 0).all()
    large = truth > 1e-4 * truth[0]
    torch.testing.assert_close(found.s.double()[large], truth[large], rtol=1e-5, atol=0)
    assert (found.s.double()[~large] <= 1.01e-4 * truth[0]).all()
    assert (reconstruct(found) - exact).norm() <= 1e-5 * exact.norm()
    for vectors in (found.u.double(), found.v.double()):
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(rank).double(), rtol=0, atol=1e-5)


# The decomposition


@some_shapes
@given(rows=sizes, columns=sizes, seed=seeds, scale=st.sampled_from([1e-30, 1e-20, 1e-3, 1.0, 1e20]))
def test_agrees_with_lapack_for_any_shape_and_scale(rows, columns, seed, scale):
    matrix = (random(rows, columns, seed=seed) * scale).float()
    assert_agrees_with_lapack(decompose(matrix), matrix)


SPECTRA = {
    "rank-deficient": [5, 3, 2, 1, 0, 0, 0, 0],
    "rank one": [7, 0, 0, 0, 0, 0, 0, 0],
    "repeated": [3, 3, 3, 2, 2, 1, 1, 1],
    "all equal": [2] * 8,
    "equal and zero": [4, 4, 4, 4, 0, 0, 0, 0],
    "nearly equal": [1 + 1e-9 * i for i in range(8, 0, -1)],
    "wide range": [10.0**-i for i in range(8)],
    "very wide range": [10.0 ** (-2 * i) for i in range(8)],
}


@pytest.mark.parametrize("shape", [(20, 8), (8, 20), (8, 8)], ids=["tall", "wide", "square"])
@pytest.mark.parametrize("scale", [1.0, 1e-20])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_agrees_with_lapack_for_awkward_spectra(spectrum, scale, shape):
    matrix = with_spectrum(*shape, np.array(SPECTRA[spectrum]) * scale, dtype=torch.float32)
    assert_agrees_with_lapack(decompose(matrix), matrix)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_agrees_with_lapack_in_float64(spectrum):
    matrix = with_spectrum(20, 8, SPECTRA[spectrum])
    found = decompose(matrix)
    assert found.s.dtype == torch.float64
    assert_agrees_with_lapack(found, matrix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_decomposed_in_float32(dtype):
    matrix = random(9, 5, dtype=dtype)
    found = decompose(matrix)
    assert found.s.dtype == found.u.dtype == found.v.dtype == torch.float32
    assert_agrees_with_lapack(found, matrix)


@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (4, 4), (1, 1)])
def test_zero_matrix_is_finite_and_orthonormal(shape):
    found = decompose(torch.zeros(shape))
    assert (found.s == 0).all()
    for vectors in (found.u, found.v):
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(min(shape)))


def test_a_zero_matrix_does_not_disturb_those_decomposed_with_it():
    full = random(6, 3, dtype=torch.float32)
    assert_agrees_with_lapack(svd({"zero": torch.zeros(6, 3), "full": full})["full"], full)


def test_rows_and_columns_of_zeros_are_harmless():
    matrix = random(12, 7, dtype=torch.float32)
    matrix[:, 2:5] = 0
    matrix[1:4] = 0
    assert_agrees_with_lapack(decompose(matrix), matrix)


def test_large_matrices_are_accurate_too():
    matrix = random(150, 80, dtype=torch.float32)
    assert_agrees_with_lapack(decompose(matrix), matrix)


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (70, 100)])
def test_equal_shapes_together_give_what_each_gives_alone(shape):
    matrices = {f"layer{i}": random(*shape, seed=i, dtype=torch.float32) for i in range(3)}
    together = svd(matrices)
    for name, matrix in matrices.items():
        for batched, single in zip(together[name], decompose(matrix), strict=True):
            torch.testing.assert_close(batched, single, rtol=1e-5, atol=1e-5)


def test_a_matrix_and_its_transpose_may_go_together():
    tall = random(9, 5, dtype=torch.float32)
    both = svd({"tall": tall, "wide": tall.mT})
    assert_agrees_with_lapack(both["tall"], tall)
    assert_agrees_with_lapack(both["wide"], tall.mT)
    torch.testing.assert_close(both["tall"].s, both["wide"].s)


def test_mixed_shapes_and_dtypes_come_back_under_their_names_in_order():
    shapes = {"z": (3, 4), "a": (70, 66), "m": (3, 4), "b": (8, 2)}
    matrices = {name: random(*shape, dtype=torch.float32) for name, shape in shapes.items()}
    matrices["m"] = matrices["m"].double()
    found = svd(matrices)
    assert list(found) == list(shapes)
    assert {name: (len(f.u), len(f.v)) for name, f in found.items()} == shapes
    assert found["m"].s.dtype == torch.float64


def test_no_matrices_give_no_decompositions():
    assert svd({}) == {}


def test_the_same_matrix_gives_the_same_bits_again():
    matrix = random(70, 90, dtype=torch.float32)
    first, second = decompose(matrix), decompose(matrix.clone())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("shape", [(9, 5), (5, 9)])
def test_signs_do_not_depend_on_the_order_of_the_longer_side(shape):
    """A shuffle of the longer side's entries shuffles its vectors; the other side's stay, sign included."""
    matrix = separated(*shape)
    shuffle = torch.randperm(9, generator=generator())
    is_tall = shape[0] > shape[1]
    u, _, v = decompose(matrix)
    shuffled_u, _, shuffled_v = decompose(matrix[shuffle] if is_tall else matrix[:, shuffle])
    torch.testing.assert_close(shuffled_u, u[shuffle] if is_tall else u)
    torch.testing.assert_close(shuffled_v, v if is_tall else v[shuffle])


@pytest.mark.parametrize("seed", range(4))
def test_the_shorter_sides_vectors_have_positive_sums(seed):
    tall, wide = random(9, 5, seed=seed), random(5, 9, seed=seed)
    assert (decompose(tall).v.sum(dim=0) > 0).all()
    assert (decompose(wide).u.sum(dim=0) > 0).all()


def test_the_weight_is_left_alone_and_the_result_has_no_graph():
    weight = torch.nn.Parameter(random(6, 4, dtype=torch.float64))
    before = weight.detach().clone()
    found = decompose(weight)
    assert torch.equal(weight, before)
    assert not any(part.requires_grad for part in found)


@pytest.mark.parametrize("shape", [(5, 5), (80, 90)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nan_and_infinity_are_refused_with_the_name_of_the_layer(shape, bad, dtype):
    broken = random(*shape, dtype=dtype)
    broken[2, 3] = bad
    with refused(kind=NonFiniteError, layer="blocks.1.conv") as caught:
        svd({"good": random(*shape, dtype=dtype), "blocks.1.conv": broken})
    assert isinstance(caught.value, ValueError)


def test_infinities_of_both_signs_are_refused():
    with refused(kind=NonFiniteError, layer="layer"):
        decompose(torch.tensor([[float("inf"), -float("inf")], [1.0, 2.0]]))


def test_finite_numbers_whose_sum_overflows_are_not_mistaken_for_infinity():
    found = decompose(torch.full((2, 1), 1e308, dtype=torch.float64))
    torch.testing.assert_close(found.s, torch.tensor([2**0.5 * 1e308], dtype=torch.float64))


def test_largest_float32_numbers_decompose():
    matrix = random(6, 4, dtype=torch.float32).clamp(-1, 1) * 1e38
    assert_agrees_with_lapack(decompose(matrix), matrix)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_is_as_before(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        svd({f"layer{i}": random(90, 80, seed=i) for i in range(4)})
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_threads_that_start_later_have_as_many_as_before():
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        svd({f"layer{i}": random(90, 80, seed=i) for i in range(4)})
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [2]


def test_the_number_of_threads_is_as_before_where_lapack_fails(monkeypatch):
    def fail(*_):
        raise torch.linalg.LinAlgError("no convergence")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(torch.linalg, "eigh", fail)
        with pytest.raises(torch.linalg.LinAlgError):
            svd({f"layer{i}": random(90, 80, seed=i) for i in range(4)})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_two_threads_give_what_one_gives():
    matrices = {f"layer{i}": random(90, 70, seed=i, dtype=torch.float32) for i in range(4)}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = svd(matrices)
        torch.set_num_threads(2)
        shared = svd(matrices)
    finally:
        torch.set_num_threads(before)
    for name in matrices:
        torch.testing.assert_close(shared[name].s, alone[name].s, rtol=1e-6, atol=0)
        torch.testing.assert_close(reconstruct(shared[name]), reconstruct(alone[name]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sigma", "rank"),
    [([3, 2, 1], 3), ([3, 2, 0], 2), ([3, 1e-9, 0], 1), ([1, 1e-5, 1e-6], 3), ([0, 0, 0], 0)],
)
def test_numerical_rank_counts_what_is_not_zero_to_rounding(sigma, rank):
    assert numerical_rank(decompose(with_spectrum(7, 3, sigma)).s) == rank


# Projection onto bases that were kept


@some_shapes
@given(rows=sizes, columns=sizes, seed=seeds)
def test_projection_onto_its_own_bases_is_the_svd(rows, columns, seed):
    matrix = random(rows, columns, seed=seed)
    own = decompose(matrix)
    again = project(matrix, own)
    torch.testing.assert_close(again.s, own.s, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(reconstruct(again), matrix, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_projection_of_a_tall_matrix_is_onto_its_right_bases(rank):
    kept, matrix = decompose(random(9, 5)), random(9, 5, seed=7)
    along = project(matrix, kept)
    lengths = (matrix @ kept.v).norm(dim=0)
    best = kept.v[:, lengths.argsort(descending=True)[:rank]]
    torch.testing.assert_close(along.s[:rank], lengths.sort(descending=True).values[:rank])
    low = along.u[:, :rank] * along.s[:rank] @ along.v[:, :rank].mT
    torch.testing.assert_close(low, matrix @ best @ best.mT)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_projection_of_a_wide_matrix_is_onto_its_left_bases(rank):
    kept, matrix = decompose(random(5, 9)), random(5, 9, seed=7)
    along = project(matrix, kept)
    lengths = (kept.u.mT @ matrix).norm(dim=1)
    best = kept.u[:, lengths.argsort(descending=True)[:rank]]
    torch.testing.assert_close(along.s[:rank], lengths.sort(descending=True).values[:rank])
    low = along.u[:, :rank] * along.s[:rank] @ along.v[:, :rank].mT
    torch.testing.assert_close(low, best @ best.mT @ matrix)


def test_projection_of_a_zero_matrix_is_zero_and_finite():
    along = project(torch.zeros(6, 4), decompose(random(6, 4, dtype=torch.float32)))
    assert all(torch.isfinite(part).all() for part in along)
    assert (reconstruct(along) == 0).all()


# Truncation


@some_shapes
@given(rows=sizes, columns=sizes, seed=seeds, data=st.data())
def test_truncation_is_the_best_approximation_of_its_rank(rows, columns, seed, data):
    rank = data.draw(st.integers(1, min(rows, columns)))
    matrix = random(rows, columns, seed=seed)
    p, q = truncate(matrix, decompose(matrix), rank)
    assert (p.shape, q.shape) == ((rows, rank), (rank, columns))
    left_out = torch.linalg.svdvals(matrix)[rank:].norm()  # Eckart and Young
    torch.testing.assert_close((p @ q - matrix).norm(), left_out, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_left_factor_is_orthonormal(shape):
    p, _ = truncate(separated(*shape), decompose(separated(*shape)), 3)
    torch.testing.assert_close(p.mT @ p, torch.eye(3).double())


def test_bases_with_no_singular_value_are_left_out():
    matrix = with_spectrum(7, 5, [3, 2, 0, 0, 0])
    p, q = truncate(matrix, decompose(matrix), 4)
    assert p.shape[1] == 2
    torch.testing.assert_close(p @ q, matrix)


SHAPES = [(7, 4), (4, 7), (5, 5)]
EVERY_RANK = [(shape, rank) for shape in SHAPES for rank in range(1, min(shape) + 1)]


def truncated_by_numpy(matrix: np.ndarray, rank: int) -> np.ndarray:
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * s[:rank] @ vt[:rank]


def our_gradient(matrix: torch.Tensor, rank: int, outer: torch.Tensor, decomposition: SVD | None = None):
    """∂⟨outer, W̃⟩/∂W, where `outer` plays G = ∂L/∂W̃."""
    w = matrix.clone().requires_grad_()
    p, q = truncate(w, decomposition or decompose(matrix), rank)
    return torch.autograd.grad((outer * (p @ q)).sum(), w)[0]


@pytest.mark.parametrize(("shape", "rank"), EVERY_RANK)
def test_gradient_agrees_with_central_differences_of_numpy(shape, rank):
    matrix, outer = separated(*shape), random(*shape, seed=5)
    step = 1e-6
    slopes = np.zeros(shape)
    for index in np.ndindex(*shape):
        nudge = np.zeros(shape)
        nudge[index] = step
        up, down = (truncated_by_numpy(matrix.numpy() + sign * nudge, rank) for sign in (1, -1))
        slopes[index] = ((up - down) * outer.numpy()).sum() / (2 * step)
    np.testing.assert_allclose(our_gradient(matrix, rank, outer), slopes, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("shape", "rank"), EVERY_RANK)
def test_gradient_passes_gradcheck_of_a_curved_loss(shape, rank):
    def loss(w: torch.Tensor) -> torch.Tensor:
        p, q = truncate(w, decompose(w.detach()), rank)
        return (p @ q).sin().square().sum()

    assert torch.autograd.gradcheck(loss, separated(*shape).requires_grad_(), eps=1e-6, atol=1e-6)


@some_shapes
@given(rows=st.integers(1, 10), columns=st.integers(1, 10), seed=seeds, data=st.data())
def test_gradient_agrees_with_autograd_through_linalg_svd(rows, columns, seed, data):
    rank = data.draw(st.integers(1, min(rows, columns)))
    matrix, outer = separated(rows, columns, seed), random(rows, columns, seed=seed + 2)
    w = matrix.clone().requires_grad_()
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    truth = torch.autograd.grad((outer * (u[:, :rank] * s[:rank] @ vt[:rank])).sum(), w)[0]
    torch.testing.assert_close(our_gradient(matrix, rank, outer), truth, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_at_full_rank_is_the_gradient_itself(shape):
    outer = random(*shape, seed=5)
    torch.testing.assert_close(our_gradient(separated(*shape), min(shape), outer), outer)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_does_not_see_what_no_change_of_the_kept_bases_could_reach(shape):
    matrix, outer = separated(*shape), random(*shape, seed=5)
    found = decompose(matrix)
    u, v = found.u[:, :2], found.v[:, :2]
    hidden = random(*shape, seed=6)
    hidden = hidden - u @ u.mT @ hidden
    hidden = hidden - hidden @ v @ v.mT
    torch.testing.assert_close(our_gradient(matrix, 2, outer + hidden), our_gradient(matrix, 2, outer))


def appendix_a(found: SVD, rank: int, outer: torch.Tensor) -> torch.Tensor:
    """Appendix A element by element, as printed: for M ≥ N, and by transposing for M < N."""
    u, s, v = (part.double() for part in found)
    if len(u) < len(v):
        return appendix_a(SVD(v, s, u), rank, outer.mT).mT
    kept, cut = range(rank), range(rank, len(s))
    gradient = outer @ v[:, :rank] @ v[:, :rank].mT
    for i in kept:
        for k in cut:
            rho = min(float(s[k] / s[i]), 0.99**0.5)
            a = v[:, i] @ outer.mT @ u[:, k]
            b = u[:, i] @ outer @ v[:, k]
            upper = rho / (1 - rho**2) * a + 1 / (1 - rho**2) * b
            lower = rho**2 / (1 - rho**2) * a + rho / (1 - rho**2) * b
            gradient = gradient + upper * torch.outer(u[:, i], v[:, k])
            gradient = gradient + lower * torch.outer(u[:, k], v[:, i])
    return gradient


CLOSE_SPECTRA = {
    "equal": [3, 2, 2, 1],
    "all equal": [2, 2, 2, 2],
    "nearly equal": [3, 2, 2 - 1e-9, 1],
    "just inside the clip": [3, 2, 2 * 0.996, 1],
    "just outside the clip": [3, 2, 2 * 0.994, 1],
}


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (4, 4)], ids=["tall", "wide", "square"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("spectrum", CLOSE_SPECTRA)
def test_gradient_of_close_singular_values_is_appendix_a_with_the_clip(spectrum, rank, shape):
    matrix, outer = with_spectrum(*shape, CLOSE_SPECTRA[spectrum]), random(*shape, seed=5)
    found = decompose(matrix)
    ours = our_gradient(matrix, rank, outer, found)
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours, appendix_a(found, rank, outer), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (4, 4)], ids=["tall", "wide", "square"])
@pytest.mark.parametrize("gap", [1e-6, 0.1])
def test_an_added_gap_stands_in_the_denominator_of_appendix_a(gap, shape):
    """Equation 6 with ε in it, basis by basis; where singular values lie apart and ε is small, it is the gradient."""
    matrix, outer = with_spectrum(*shape, [4, 2, 1.5, 0.5]), random(*shape, seed=5)
    w = matrix.double().requires_grad_(True)
    u, s, v = found = decompose(w.detach())
    p, q = truncate(w, found, 2, added_gap=gap)
    ((p @ q) * outer.double()).sum().backward()
    gradient = outer.double() @ v[:, :2] @ v[:, :2].mT + u[:, :2] @ u[:, :2].mT @ outer.double()
    gradient = gradient - u[:, :2] @ u[:, :2].mT @ outer.double() @ v[:, :2] @ v[:, :2].mT
    for i in (0, 1):
        for k in (2, 3):
            a, b = v[:, i] @ outer.double().mT @ u[:, k], u[:, i] @ outer.double() @ v[:, k]
            gaps = s[i] ** 2 - s[k] ** 2 + gap
            gradient = gradient + (s[i] * s[k] * a + s[k] ** 2 * b) / gaps * torch.outer(u[:, i], v[:, k])
            gradient = gradient + (s[k] ** 2 * a + s[i] * s[k] * b) / gaps * torch.outer(u[:, k], v[:, i])
    torch.testing.assert_close(w.grad, gradient, rtol=1e-9, atol=1e-9)
    if gap < 1e-3:
        torch.testing.assert_close(w.grad, our_gradient(matrix.double(), 2, outer.double()), rtol=1e-5, atol=1e-5)


def test_clip_is_the_root_of_0_99_and_bounds_the_gradient():
    assert abs(RHO_MAX**2 - 0.99) < 1e-12
    matrix = with_spectrum(6, 4, [2, 2, 2, 2])
    outer = random(6, 4, seed=5)
    assert our_gradient(matrix, 2, outer).norm() <= 400 * outer.norm()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_does_not_depend_on_the_scale_of_the_weight(scale, dtype):
    matrix, outer = separated(7, 4).to(dtype), random(7, 4, seed=5, dtype=dtype)
    scaled = our_gradient(matrix * scale, 2, outer)
    torch.testing.assert_close(scaled, our_gradient(matrix, 2, outer), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_at_zero_is_zero(shape, rank):
    gradient = our_gradient(torch.zeros(shape, dtype=torch.float64), rank, random(*shape, seed=5))
    assert (gradient == 0).all()


def tangent_projection(matrix: torch.Tensor, rank: int, outer: torch.Tensor) -> torch.Tensor:
    """The part of `outer` that is tangent, at `matrix`, to the matrices of its rank."""
    u, _, vt = np.linalg.svd(matrix.double().numpy())
    left, right = u[:, :rank] @ u[:, :rank].T, vt[:rank].T @ vt[:rank]
    g = outer.double().numpy()
    return torch.from_numpy(left @ g + g @ right - left @ g @ right)


@pytest.mark.parametrize("scale", [1.0, 1e-20])
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (4, 4)], ids=["tall", "wide", "square"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_where_w_has_a_smaller_rank_is_the_tangent_projection(shape, rank, scale, dtype):
    matrix = with_spectrum(*shape, [3 * scale, 1 * scale], dtype=dtype)
    outer = random(*shape, seed=5, dtype=dtype)
    ours = our_gradient(matrix, rank, outer)
    torch.testing.assert_close(ours.double(), tangent_projection(matrix, 2, outer), rtol=1e-4, atol=1e-4)


def test_gradient_of_a_deficient_weight_is_the_derivative_along_its_own_tangent_directions():
    """Where W has rank q < r, W̃ has a derivative along the tangent space, and the gradient is that."""
    matrix, outer = with_spectrum(7, 4, [3, 1]), random(7, 4, seed=5)
    along = tangent_projection(matrix, 2, random(7, 4, seed=6))
    step = 1e-6
    up, down = (truncated_by_numpy((matrix + sign * step * along).numpy(), 3) for sign in (1, -1))
    slope = ((up - down) * outer.numpy()).sum() / (2 * step)
    assert float((our_gradient(matrix, 3, outer) * along).sum()) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (5, 5)])
def test_two_matrix_products_give_the_gradient_of_the_dense_product(shape, rank):
    x, target = random(6, shape[0], seed=3), random(6, shape[1], seed=4)

    def gradient(apply):
        w = separated(*shape).requires_grad_()
        p, q = truncate(w, decompose(w.detach()), rank)
        return torch.autograd.grad((apply(p, q).tanh() - target).square().sum(), w)[0]

    factored = gradient(lambda p, q: x @ p @ q)
    torch.testing.assert_close(factored, gradient(lambda p, q: x @ (p @ q)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["channel", "spatial"])
@pytest.mark.parametrize("shape", [(6, 2, 3, 3), (2, 6, 3, 5)])
def test_two_convolutions_give_the_gradient_of_the_dense_convolution(shape, form):
    image = random(2, shape[1], 7, 7, seed=3)
    weight = to_weight(separated(*matrix_shape(shape, form)), shape, form)

    def gradient(apply):
        w = weight.clone().requires_grad_()
        matrix = to_matrix(w, form)
        p, q = truncate(matrix, decompose(matrix.detach()), 2)
        return torch.autograd.grad(apply(p, q).tanh().square().sum(), w)[0]

    def two_layers(p, q):
        first, second = matrix_form(form).stages_of(p, q, shape)
        return F.conv2d(F.conv2d(image, first), second)

    factored = gradient(two_layers)
    dense = gradient(lambda p, q: F.conv2d(image, to_weight(p @ q, shape, form)))
    torch.testing.assert_close(factored, dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_and_gradient_have_the_dtype_of_the_weight(dtype):
    w = random(7, 4, dtype=dtype).requires_grad_()
    p, q = truncate(w, decompose(w.detach()), 2)
    (gradient,) = torch.autograd.grad((p @ q).sum(), w)
    assert p.dtype == q.dtype == gradient.dtype == dtype
    assert torch.isfinite(gradient).all()


def test_gradient_with_bases_that_were_kept_is_appendix_a_with_the_projected_quantities():
    for shape in SHAPES:
        matrix, outer = separated(*shape, seed=3), random(*shape, seed=5)
        along = project(matrix, decompose(matrix + 0.05 * random(*shape, seed=4)))
        ours = our_gradient(matrix, 2, outer, along)
        torch.testing.assert_close(ours, appendix_a(along, 2, outer), rtol=1e-8, atol=1e-8)
