"""Tucker-2 in the core: its factors, its gradient against finite differences and autograd, and the joint step."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import decomposable as dn
from decomposable.core.forms import FORMS
from decomposable.core.layers import find_layers
from decomposable.core.standin import product
from decomposable.core.svd import RHO_MAX, Left, left_svd, projection_gradient
from decomposable_edge import errors
from refusals import refused

TUCKER = FORMS["tucker"]
# O, I and the kernel: equal, more outputs than the inputs' taps (null vectors), more inputs, one and three axes.
SHAPES = [(6, 5, 3, 3), (20, 2, 3, 1), (2, 13, 2, 3), (5, 6, 3), (4, 3, 2, 2, 2)]


def random(*shape):
    torch.manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64)


def bases(weight):
    return TUCKER.decompose({"w": weight.detach()})["w"]


def low(weight, ranks):
    """W ×_I P_a ×_O P_b by LAPACK, differentiable by torch's own rules."""
    made = weight
    for axis, rank in ((1, ranks[0]), (0, ranks[1])):
        matrix = weight.transpose(0, axis).flatten(1)
        if rank < len(matrix):
            u = torch.linalg.svd(matrix, full_matrices=False)[0][:, :rank]
            turned = made.transpose(0, axis)
            made = (u @ (u.mT @ turned.flatten(1))).reshape(turned.shape).transpose(0, axis)
    return made


def some_ranks(shape):
    full = TUCKER.chain(shape).full_ranks
    return sorted(
        {(1, 1), tuple(max(1, f // 2) for f in full), (full[0], max(1, full[1] - 1)), (max(1, full[0] - 1), full[1])}
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_at_full_rank_the_three_stages_are_the_weight(shape):
    weight = random(*shape)
    chain, found = TUCKER.chain(shape), bases(weight)
    orders = [torch.arange(len(s)) for s in found.spectra]
    stages = TUCKER.weights(weight, found, orders)
    assert tuple(tuple(each.shape) for each in stages) == chain.shapes(chain.full_ranks)
    torch.testing.assert_close(product(stages), weight, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_and_vectors_are_those_of_the_unfoldings(shape):
    weight = random(*shape)
    found = bases(weight)
    for axis, left in found.sides:
        matrix = weight.transpose(0, axis).flatten(1)
        torch.testing.assert_close(left.s, torch.linalg.svdvals(matrix), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(left.u.mT @ left.u, torch.eye(len(matrix), dtype=torch.float64))
        torch.testing.assert_close((left.u.mT @ matrix).norm(dim=1)[: len(left.s)], left.s, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_ranks_are_a_slice_of_the_full_core_and_two_projections(shape):
    weight = random(*shape)
    found = bases(weight)
    first, core, last = TUCKER.weights(weight, found, [torch.arange(len(s)) for s in found.spectra])
    for a, b in some_ranks(shape):
        wanted = low(weight, (a, b))
        torch.testing.assert_close(product((first[:a], core[:b, :a], last[:, :b])), wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(product(TUCKER.truncate(weight, found, (a, b))), wanted, rtol=1e-9, atol=1e-9)


def loss_of(weight):
    """Not linear, and different for every entry."""
    scale = torch.arange(1.0, weight.numel() + 1, dtype=weight.dtype).reshape(weight.shape) / weight.numel()
    return (scale * weight.sin() + 0.3 * weight.square()).sum()


def separated(shape):
    """A weight whose unfoldings have singular values that are far from each other: nothing is clipped."""
    weight = random(*shape)
    for axis in (0, 1):
        scale = 1.7 ** -torch.arange(shape[axis], dtype=torch.float64)
        weight = weight * scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return weight


def is_clipped(found, ranks):
    cuts = zip(found.spectra, ranks, strict=True)
    return any(rank < len(s) and s[rank] / s[rank - 1] > RHO_MAX for s, rank in cuts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_is_that_of_finite_differences(shape):
    weight = separated(shape)
    for ranks in some_ranks(shape):
        found = bases(weight)
        assert not is_clipped(found, ranks)
        leaf = weight.clone().requires_grad_()
        (ours,) = torch.autograd.grad(loss_of(product(TUCKER.truncate(leaf, found, ranks))), leaf)
        for number in range(4):
            torch.manual_seed(number)
            direction = torch.randn_like(weight)
            direction /= direction.norm()

            def along(step, direction=direction, ranks=ranks):
                return loss_of(low(weight + step * direction, ranks))

            step = 1e-3
            near, far = ((along(h) - along(-h)) / (2 * h) for h in (step, 2 * step))
            nearer, _ = ((along(h) - along(-h)) / (2 * h) for h in (step / 2, step))
            # Richardson's: errors of the second and of the fourth order cancel.
            fourth = (4 * near - far) / 3
            finer = (4 * nearer - near) / 3
            numerical = (16 * finer - fourth) / 15
            assert float((ours * direction).sum()) == pytest.approx(float(numerical), rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_is_that_of_autograd_through_an_eigendecomposition(shape):
    weight = separated(shape)
    for ranks in some_ranks(shape):
        leaf = weight.clone().requires_grad_()
        (ours,) = torch.autograd.grad(loss_of(product(TUCKER.truncate(leaf, bases(leaf), ranks))), leaf)
        other = weight.clone().requires_grad_()
        (theirs,) = torch.autograd.grad(loss_of(low(other, ranks)), other)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(20, 2, 3, 1), (2, 13, 2, 3)], ids=str)
def test_where_nothing_but_null_vectors_is_dropped_the_gradient_is_that_of_the_weight_itself(shape):
    weight = random(*shape).requires_grad_()
    full = TUCKER.chain(shape).full_ranks
    assert any(rank < size for rank, size in zip(full, (shape[1], shape[0]), strict=True))
    (ours,) = torch.autograd.grad(loss_of(product(TUCKER.truncate(weight, bases(weight), full))), weight)
    (plain,) = torch.autograd.grad(loss_of(weight), weight)
    torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


def test_run_as_three_layers_the_gradient_is_the_same():
    weight, x = separated((6, 5, 3, 3)), random(2, 5, 7, 8)
    gradients = []
    for runs_as in ("chain", "dense"):
        leaf = weight.clone().requires_grad_()
        stages = TUCKER.truncate(leaf, bases(leaf), (3, 4))
        if runs_as == "chain":
            y = F.conv2d(F.conv2d(F.conv2d(x, stages[0]), stages[1], padding=1, stride=2), stages[2])
        else:
            y = F.conv2d(x, product(stages), padding=1, stride=2)
        gradients.append(torch.autograd.grad(loss_of(y), leaf)[0])
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_close_singular_values_are_clipped_and_zero_ones_contribute_nothing():
    u = torch.linalg.qr(random(4, 4))[0]
    grad = random(2, 2)
    close = projection_gradient(Left(u, torch.tensor([2.0, 1.0, 1.0, 0.0], dtype=torch.float64)), grad)
    bound = (u.mT @ close @ u)[1, 2] / grad[1, 0]
    assert float(bound) == pytest.approx(1 / (1 - RHO_MAX**2), rel=1e-9)
    zero = projection_gradient(Left(u, torch.tensor([2.0, 0.0, 0.0, 0.0], dtype=torch.float64)), grad)
    assert torch.isfinite(zero).all()
    assert torch.equal(zero, zero.mT)
    assert float((u.mT @ zero @ u)[1].abs().max()) < 1e-12
    gap = projection_gradient(Left(u, torch.tensor([2.0, 1.0, 1.0, 0.0], dtype=torch.float64)), grad, added_gap=0.5)
    assert float((u.mT @ gap @ u)[1, 2] / grad[1, 0]) == pytest.approx(2.0)


@pytest.mark.parametrize("kind", ["zeros", "rank one", "tiny"])
def test_the_gradient_of_weights_without_full_rank_is_finite(kind):
    weight = random(6, 5, 3, 3)
    if kind == "zeros":
        weight = torch.zeros_like(weight)
    elif kind == "rank one":
        weight = weight[:1, :1].expand(6, 5, 3, 3).contiguous()
    else:
        weight = (weight * 1e-25).float()
    leaf = weight.clone().requires_grad_()
    stages = TUCKER.truncate(leaf, bases(leaf), (4, 5))
    (gradient,) = torch.autograd.grad((product(stages) * 3).sum(), leaf)
    assert torch.isfinite(gradient).all()
    if kind == "rank one":
        assert [len(each) for each in stages[:-1]] == [1, 1]


def test_left_vectors_of_float32_are_as_good_as_those_of_float64():
    weight = random(40, 30, 3, 3)
    exact, coarse = bases(weight), bases(weight.float())
    assert coarse.u_in.dtype == torch.float32
    for one, other in zip(exact.spectra, coarse.spectra, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-5, atol=1e-5)
    for u in (coarse.u_in, coarse.u_out):
        torch.testing.assert_close(u.mT @ u, torch.eye(len(u)), rtol=0, atol=1e-5)


def test_a_weight_that_is_not_finite_is_named():
    weight = torch.zeros(4, 3, 3, 3)
    weight[0, 0, 0, 0] = torch.nan
    with refused(kind=errors.NonFiniteError, layer="conv"):
        TUCKER.decompose({"conv": weight})
    with refused(kind=errors.NonFiniteError, layer="b"):
        left_svd({"a": torch.ones(3, 4), "b": torch.full((3, 4), torch.inf)})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.layer4 = nn.Sequential(nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(12, 10, (3, 1)))
        self.fc = nn.Linear(10, 4)

    def forward(self, x):
        return self.fc(self.layer4(F.relu(self.conv(x))).mean((2, 3)))


@pytest.mark.parametrize("runs_as", ["chain", "dense"])
def test_a_joint_step_has_the_gradient_of_the_truncated_network(runs_as, monkeypatch):
    from decomposable.core import lowrank

    monkeypatch.setattr(lowrank, "chain_is_faster", lambda *_, **__: runs_as == "chain")
    torch.manual_seed(0)
    model, x, y = Net().double(), torch.randn(4, 3, 9, 9, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    joint = dn.JointObjective(model, form="tucker", ratio=0.5)

    def loss(net):
        return F.cross_entropy(net(x), y)

    _, ours = joint.gradients(loss)
    decompositions = joint._bases.of_current_weights()
    ranks = joint.select_ranks(decompositions, 0.5)
    assert isinstance(ranks["conv"], tuple)
    assert isinstance(ranks["fc"], int)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    weights = dict(leaves)
    for layer in joint.layers:
        key, rank = f"{layer.name}.weight", ranks[layer.name]
        if isinstance(rank, tuple):
            weights[key] = low(leaves[key], rank)
        else:
            u, s, vt = torch.linalg.svd(leaves[key], full_matrices=False)
            weights[key] = u[:, :rank] @ torch.diag(s[:rank]) @ vt[:rank]
    wanted = torch.autograd.grad(
        F.cross_entropy(torch.func.functional_call(model, weights, x), y), list(leaves.values())
    )
    for (name, parameter), value in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(ours[parameter], value, rtol=1e-6, atol=1e-9, msg=name)


def test_between_refreshes_the_bases_are_kept_and_a_state_brings_them_back():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 3, 9, 9)
    options = {"form": "tucker", "ratio": (0.2, 0.6), "refresh": 4, "seed": 1}
    joint = dn.JointObjective(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(one):
        optimizer.zero_grad()
        one.backward(lambda net: net(x).square().mean())
        optimizer.step()

    for _ in range(3):
        step(joint)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = joint.state_dict()
    step(joint)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    other = dn.JointObjective(model, **options)
    other.load_state_dict(state)
    step(other)
    for name, value in model.state_dict().items():
        assert torch.equal(value, after[name]), name


def test_a_layer_chooses_its_form_by_name():
    model = Net()
    layers, _ = find_layers(model, {"layer4.*": "tucker", "*": "spatial"})
    assert {layer.name: layer.form for layer in layers} == {
        "conv": "spatial", "layer4.0": "tucker", "layer4.2": "tucker", "fc": "channel"
    }  # fmt: skip
    layers, _ = find_layers(model, {"conv": "channel"})
    assert [layer.form for layer in layers] == ["channel", "spatial", "spatial", "channel"]
    with refused("form", "layr4"):
        find_layers(model, {"layr4": "tucker"})
    with refused("form", "tuker", "'channel', 'spatial', 'tucker'"):
        dn.JointObjective(model, form={"conv": "tuker"})
    with refused("form", None):
        dn.decompose(model, form={"conv": None})


def test_taylor_scores_are_what_the_loss_loses_to_first_order():
    torch.manual_seed(0)
    model, x = nn.Conv2d(4, 5, 3, bias=False).double(), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    weight = model.weight.detach().clone()
    found = bases(weight)
    leaf = weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.conv2d(x, leaf).pow(3).sum(), leaf)
    influences = TUCKER.influences(gradient, weight, found)
    for (axis, left), scores in zip(found.sides, influences, strict=True):
        for i, score in enumerate(scores):
            matrix = weight.transpose(0, axis).flatten(1)
            gone = (left.u[:, i : i + 1] @ (left.u[:, i : i + 1].mT @ matrix)).reshape(weight.transpose(0, axis).shape)
            wanted = (gradient * gone.transpose(0, axis)).sum().abs()
            assert float(score) == pytest.approx(float(wanted), rel=1e-9)
    assert all(np.isfinite(each.numpy()).all() for each in influences)
