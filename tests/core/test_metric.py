"""W in the metric of data: against Eckart and Young with symmetric roots, and the output that is really lost."""

import pytest
import torch

from decomposable.core.metric import DAMPING, Product, _root, decompose_in_metric, losses_in_metric
from decomposable.core.sums import Moments

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def moment(size, samples=50):
    x = normal(size, samples) * torch.linspace(0.1, 3, size, dtype=torch.float64)[:, None]
    return x @ x.mT / samples


def root(matrix):
    """A^½, the symmetric one."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.mT


def whole(w):
    """W as a product with as few bases as it can have."""
    rows, columns = w.shape
    one = torch.eye(min(rows, columns), dtype=w.dtype)
    return Product(w, one) if columns <= rows else Product(one, w)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7), (1, 5), (5, 1)])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_every_cut_is_the_best_one_in_the_metric(shape, has_gradients):
    w, a, g = normal(*shape), moment(shape[0]), moment(shape[1]) if has_gradients else None
    p, q, losses = decompose_in_metric({"w": whole(w)}, {"w": Moments(a, g)}, damping=0.0)["w"]
    torch.testing.assert_close(p @ q, w)
    left, right = root(a), root(g) if g is not None else torch.eye(shape[1], dtype=w.dtype)
    sigma = torch.linalg.svdvals(left @ w @ right)
    torch.testing.assert_close(losses, sigma.square(), rtol=1e-6, atol=1e-9)
    for rank in range(min(shape)):
        lost = (left @ (w - p[:, :rank] @ q[:rank]) @ right).square().sum()
        torch.testing.assert_close(lost, sigma[rank:].square().sum(), rtol=1e-6, atol=1e-9)


def test_without_gradients_the_loss_is_that_of_the_output():
    x, w = normal(40, 8), normal(8, 5)
    p, q, losses = decompose_in_metric({"w": whole(w)}, {"w": Moments(x.mT @ x / 40)}, damping=0.0)["w"]
    for rank in range(5):
        lost = (x @ w - x @ (p[:, :rank] @ q[:rank])).square().sum(dim=1).mean()
        torch.testing.assert_close(lost, losses[rank:].sum(), rtol=1e-6, atol=1e-9)


def test_both_sides_of_a_basis_are_of_one_length():
    p, q, _ = decompose_in_metric({"w": whole(normal(6, 9))}, {"w": Moments(moment(6), moment(9))})["w"]
    torch.testing.assert_close(p.norm(dim=0), q.norm(dim=1))


def test_what_was_cut_is_turned_inside_what_is_left():
    w = normal(8, 6)
    p, q, _ = decompose_in_metric({"w": whole(w)}, {"w": Moments(moment(8), moment(6))})["w"]
    kept = Product(p[:, :3], q[:3])
    turned = decompose_in_metric({"w": kept}, {"w": Moments(moment(8), moment(6))})["w"]
    assert turned.p.shape == (8, 3)
    torch.testing.assert_close(turned.p @ turned.q, kept.p @ kept.q)
    assert not torch.allclose(turned.p, kept.p)
    for before, after in ((kept.p, turned.p), (kept.q.mT, turned.q.mT)):
        assert torch.linalg.matrix_rank(torch.cat([before, after], dim=1)) == 3


def test_directions_that_no_data_used_go_first():
    w = torch.diag(torch.tensor([5.0, 4.0, 3.0, 2.0], dtype=torch.float64))
    a = torch.diag(torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    p, q, losses = decompose_in_metric({"w": whole(w)}, {"w": Moments(a)})["w"]
    torch.testing.assert_close((p[:, :3] @ q[:3]).diagonal(), torch.tensor([0.0, 4, 3, 2], dtype=torch.float64))
    assert losses[3] < 0.03


@pytest.mark.parametrize("felt", [(0, 0), (1, 0), (0, 1), (1, 1e-44)])  # the last is what float32 has no digits for
def test_a_layer_that_nothing_depends_on_loses_nothing(felt):
    """One that no batch has reached, or whose output no gradient comes back to, as that of an auxiliary head."""
    w = normal(5, 4)
    inputs, gradients = (each * torch.eye(size, dtype=w.dtype) for each, size in zip(felt, (5, 4), strict=True))
    p, q, losses = decompose_in_metric({"w": whole(w)}, {"w": Moments(inputs, gradients)})["w"]
    torch.testing.assert_close(p @ q, w)
    assert losses.tolist() == [0.0] * 4
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    torch.testing.assert_close(p[:, :2] @ q[:2], (u[:, :2] * s[:2]) @ vt[:2])  # the order inside is that of the weights


def test_roots_in_parts_give_the_same(monkeypatch):
    products = {str(i): whole(normal(6, 5)) for i in range(4)}
    moments = {name: Moments(moment(6), moment(5)) for name in products}
    before = {name: one.inputs.clone() for name, one in moments.items()}
    together = decompose_in_metric(products, moments)
    monkeypatch.setattr("decomposable.core.metric.MOST_ROOTS", 1)
    for name, found in decompose_in_metric(products, moments).items():
        torch.testing.assert_close(found.losses, together[name].losses)
        assert torch.equal(moments[name].inputs, before[name])  # which damping must not change


def test_a_matrix_of_less_than_full_rank():
    w = normal(6, 2) @ normal(2, 5)
    p, q, losses = decompose_in_metric({"w": whole(w)}, {"w": Moments(moment(6), moment(5))})["w"]
    torch.testing.assert_close(p @ q, w)
    assert (losses[2:] < 1e-9 * losses[0]).all()
    assert torch.isfinite(p).all()


def test_a_moment_that_rounding_has_left_indefinite_is_damped_until_it_has_a_root():
    """As it can be near the smallest numbers of float32; elsewhere rounding is far below the damping."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 40, generator=generator)
    rounded = (x.mT @ x).double()
    rounded.diagonal().sub_(5 * DAMPING * rounded.diagonal().mean())  # more than the damping
    assert torch.linalg.eigvalsh(rounded).min() < 0
    [root] = _root(rounded, torch.device("cpu"), DAMPING)
    assert torch.equal(root, root.tril())
    lost = (root @ root.mT - rounded).abs().max() / rounded.diagonal().mean()
    assert lost == pytest.approx(10 * DAMPING, rel=1e-3)
    definite = torch.eye(4, dtype=torch.float64)
    assert _root(definite, torch.device("cpu"), DAMPING)[0].diagonal().tolist() == pytest.approx(
        [(1 + DAMPING) ** 0.5] * 4
    )


@pytest.mark.parametrize("has_gradients", [True, False])
def test_what_a_cut_loses_in_the_metric_of_other_data(has_gradients):
    """tr(A E G Eᵀ) at every rank, of bases that come from other moments."""
    w, a, g = normal(7, 5), moment(7), moment(5) if has_gradients else None
    p, q, _ = decompose_in_metric({"w": whole(w)}, {"w": Moments(moment(7), moment(5))})["w"]
    found = losses_in_metric(Product(p, q), Moments(a, g))
    for rank in range(6):
        e = w - p[:, :rank] @ q[:rank]
        lost = torch.trace(a @ e @ (torch.eye(5, dtype=w.dtype) if g is None else g) @ e.mT)
        torch.testing.assert_close(found[rank], lost, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(10, 6), (6, 10)])
def test_blocks_are_a_moment_that_is_zero_outside_of_them(shape):
    w = normal(*shape)
    sides = []
    for width in shape:
        blocks = torch.stack([moment(4) for _ in range(-(-width // 4))])
        matrix = torch.block_diag(*blocks)[:width, :width]
        blocks[-1, width - 4 * (len(blocks) - 1) :] = blocks[-1, :, width - 4 * (len(blocks) - 1) :] = 0
        sides.append((blocks, matrix))
    (a_blocks, a), (g_blocks, g) = sides
    in_blocks = decompose_in_metric({"w": whole(w)}, {"w": Moments(a_blocks, g_blocks)}, damping=1e-12)["w"]
    in_whole = decompose_in_metric({"w": whole(w)}, {"w": Moments(a, g)}, damping=1e-12)["w"]
    torch.testing.assert_close(in_blocks.losses, in_whole.losses)
    torch.testing.assert_close(in_blocks.p @ in_blocks.q, w)
    torch.testing.assert_close(in_blocks.p[:, :3] @ in_blocks.q[:3], in_whole.p[:, :3] @ in_whole.q[:3])
    product = Product(in_whole.p, in_whole.q)
    torch.testing.assert_close(
        losses_in_metric(product, Moments(a_blocks, g_blocks)), losses_in_metric(product, Moments(a, g))
    )
