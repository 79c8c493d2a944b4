"""Trained Rank Pruning against LAPACK in float64: what is truncated, when, and what the gradient gets."""

import copy
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from decomposable import models
from decomposable.core.tree import deep_copy
from decomposable.recipes.settings import Settings
from decomposable.training.methods.base import CalibrationData
from decomposable.training.methods.flat import with_overrides
from decomposable_edge.errors import InvalidArgumentError, NonFiniteError
from decomposable_lab.methods import trp
from decomposable_lab.methods.trp import METHOD, TRPSettings, selected_layers, truncate_network_

# Few sizes are calibrated here, on purpose: what a size far from them does is looked at in test_grid.py.
pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation was calibrated")

SETTINGS = with_overrides(Settings(), method="trp", trp_energy=0.9, trp_strength=0.01)
FORMS = ["spatial", "channel"]
# Rounding of a float32 weight, times a few for the products that make it: a part of the largest singular value.
ROUNDING = 1e-6


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def cnn():
    """Tall, wide and square matrices, a stride, a bias and a 1 × 1 convolution, for images of 3 × 8 × 8."""
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1, bias=False),
        nn.BatchNorm2d(10),
        nn.ReLU(),
        nn.Conv2d(10, 12, (3, 1), stride=2, padding=(1, 0)),
        nn.ReLU(),
        nn.Conv2d(12, 6, 1),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(128, 7),
    )


class Shared(nn.Module):
    """One kernel for two convolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.two.weight = self.one.weight
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.two(F.relu(self.one(self.stem(x)))))
        return self.head(x.mean(dim=(2, 3)))


def batch(count=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 8, 8, generator=generator), torch.arange(count) % 5


def loss_of(net):
    x, y = batch()
    return F.cross_entropy(net(x), y)


def matrix(weight, form):
    """The matrix of a weight, laid out anew: (I·W) × (O·H) for the spatial form, else (I·H·W) × O."""
    w = weight.detach().double()
    if w.dim() == 2 or form == "channel" or w.shape[2:] == (1, 1):
        return w.flatten(1).T
    o, i, h, width = w.shape
    return torch.einsum("oihw->iwoh", w).reshape(i * width, o * h)


def to_weight(m, weight, form):
    if weight.dim() == 2 or form == "channel" or weight.shape[2:] == (1, 1):
        return m.T.reshape(weight.shape)
    o, i, h, width = weight.shape
    return torch.einsum("iwoh->oihw", m.reshape(i, width, o, h))


def weights(model):
    return {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}


def sigma(weight, form):
    return torch.linalg.svdvals(matrix(weight, form))


def material(x, batches=2):
    return CalibrationData(
        example_input=x[:1],
        calibration=[(x, torch.zeros(len(x), dtype=torch.long)) for _ in range(batches)],
        loss=lambda net, pair: F.cross_entropy(net(pair[0]), pair[1]),
    )


def macs(module, x):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x[:1])
    return counter.get_total_flops() / 2


# Truncation


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99, 0.9999])
def test_each_weight_has_the_smallest_rank_that_keeps_the_energy_and_not_one_basis_more(form, energy):
    model = cnn()
    before = {name: sigma(weight, form) for name, weight in weights(model).items()}
    ranks = truncate_network_(model, with_overrides(SETTINGS, form=form, trp_energy=energy))
    assert list(ranks) == list(before)
    for name, weight in weights(model).items():
        squares, rank = before[name].square(), ranks[name]
        assert squares[:rank].sum() >= energy * squares.sum() * (1 - 1e-6)
        assert rank == 1 or squares[: rank - 1].sum() < energy * squares.sum()
        after = sigma(weight, form)
        assert (after[rank:] <= ROUNDING * after[0]).all()
        torch.testing.assert_close(after[:rank], before[name][:rank], rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_left_is_the_best_approximation_of_that_rank(form):
    model = cnn()
    original = {name: matrix(weight, form) for name, weight in weights(model).items()}
    ranks = truncate_network_(model, replace(SETTINGS, form=form))
    for name, weight in weights(model).items():
        u, s, vt = torch.linalg.svd(original[name], full_matrices=False)
        best = (u[:, : ranks[name]] * s[: ranks[name]]) @ vt[: ranks[name]]
        torch.testing.assert_close(matrix(weight, form), best, rtol=0, atol=1e-6)


def test_all_of_the_energy_leaves_every_bit():
    model = cnn()
    with torch.no_grad():
        model[9].weight[3] = model[9].weight[4]  # a singular value of zero
    before = copy.deepcopy(model.state_dict())
    ranks = truncate_network_(model, with_overrides(SETTINGS, trp_energy=1.0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert ranks == {"0": 9, "3": 10, "5": 6, "7": 18, "9": 6}


def test_a_weight_of_zeros_keeps_one_basis_and_gives_finite_gradients():
    model = cnn()
    nn.init.zeros_(model[9].weight)
    step = METHOD.step(model, SETTINGS)
    assert math.isfinite(step.backward(loss_of)["loss"])
    assert step.ranks["9"] == 1
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_diagonal_matrix_by_hand():
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.diag(torch.tensor([2.0, 0.1, 1.0, 1.0])))  # energies 4, 0.01, 1, 1 of 6.01
    assert truncate_network_(model, with_overrides(SETTINGS, trp_energy=0.998)) == {"": 3}
    torch.testing.assert_close(model.weight.detach(), torch.diag(torch.tensor([2.0, 0.0, 1.0, 1.0])), atol=1e-6, rtol=0)
    assert truncate_network_(model, with_overrides(SETTINGS, trp_energy=0.6)) == {"": 1}
    torch.testing.assert_close(model.weight.detach(), torch.diag(torch.tensor([2.0, 0.0, 0.0, 0.0])), atol=1e-6, rtol=0)


def test_digits_of_the_energy_far_behind_the_point_count():
    """ImageNet's e: 1 − e = 1e-6, and a float32 sum of the squares would not see the difference."""
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.diag(torch.tensor([1.0, 1.1e-3, 0.9e-3])))  # of the energy: 1, 1.21e-6, 0.81e-6
    assert truncate_network_(copy.deepcopy(model), with_overrides(SETTINGS, trp_energy=0.999999)) == {"": 2}
    assert truncate_network_(copy.deepcopy(model), with_overrides(SETTINGS, trp_energy=0.999995)) == {"": 1}
    assert truncate_network_(copy.deepcopy(model), with_overrides(SETTINGS, trp_energy=0.9999995)) == {"": 3}


@pytest.mark.parametrize("form", FORMS)
def test_channels_last_weights_stay_the_same_parameters_in_the_same_layout(form):
    settings = replace(SETTINGS, form=form)
    plain = cnn()
    model = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    before = {name: (id(w), w.data_ptr(), w.stride()) for name, w in weights(model).items()}
    METHOD.step(model, settings).backward(loss_of)
    METHOD.step(plain, settings).backward(loss_of)
    assert {name: (id(w), w.data_ptr(), w.stride()) for name, w in weights(model).items()} == before
    for name, weight in weights(plain).items():
        torch.testing.assert_close(weights(model)[name].detach(), weight.detach(), rtol=0, atol=1e-6)
        torch.testing.assert_close(weights(model)[name].grad, weight.grad, rtol=1e-3, atol=1e-5)


# The gradient


@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_is_the_plain_one_at_truncated_weights_and_the_nuclear_norms(form):
    model = cnn()
    settings = replace(SETTINGS, form=form)
    twin = deep_copy(model)
    ranks = truncate_network_(twin, settings)
    loss_of(twin).backward()
    logged = METHOD.step(model, settings).backward(loss_of)
    assert logged["loss"] == loss_of(twin).detach()
    for name, weight in weights(model).items():
        same = weights(twin)[name]
        u, _, vt = torch.linalg.svd(matrix(same, form), full_matrices=False)
        uv = to_weight(u[:, : ranks[name]] @ vt[: ranks[name]], same, form)
        torch.testing.assert_close(weight.detach(), same.detach(), rtol=0, atol=0)
        torch.testing.assert_close(
            weight.grad.double(), same.grad.double() + settings.of(TRPSettings).trp_strength * uv, rtol=1e-5, atol=1e-6
        )
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        if name.removesuffix(".weight") not in ranks:
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_added_is_a_subgradient_of_the_nuclear_norm(form):
    """‖X‖_* ≥ ‖W‖_* + <UVᵀ, X − W> for every X."""
    model = cnn()
    step = METHOD.step(model, with_overrides(SETTINGS, form=form, trp_strength=1.0))
    step.backward(lambda net: 0.0 * loss_of(net))
    for weight in weights(model).values():
        w, g = matrix(weight, form), matrix(weight.grad, form)
        norm = torch.linalg.matrix_norm(w, "nuc")
        torch.testing.assert_close((g * w).sum(), norm, rtol=1e-5, atol=0)
        for scale in (1e-3, 0.1, 1.0, 10.0):
            for x in (w + scale * torch.randn_like(w), scale * torch.randn_like(w), -scale * w, scale * g):
                assert torch.linalg.matrix_norm(x, "nuc") >= norm + (g * (x - w)).sum() - 1e-5 * (norm + x.norm())


def test_gradients_add_up_as_backward_does():
    model, twin = cnn(), cnn()
    twin.load_state_dict(model.state_dict())
    METHOD.step(model, SETTINGS).backward(loss_of)
    for parameter in twin.parameters():
        parameter.grad = torch.ones_like(parameter)
    METHOD.step(twin, SETTINGS).backward(loss_of)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad - 1, ours.grad, rtol=1e-4, atol=1e-6)


def test_without_strength_it_is_the_plain_gradient():
    model = cnn()
    METHOD.step(model, with_overrides(SETTINGS, trp_strength=0.0)).backward(loss_of)
    gradients = {name: weight.grad.clone() for name, weight in weights(model).items()}
    model.zero_grad()
    loss_of(model).backward()
    assert all(torch.equal(weight.grad, gradients[name]) for name, weight in weights(model).items())


def test_a_layer_that_the_pass_left_out_still_has_the_nuclear_norms_gradient_and_a_frozen_one_has_none():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle, self.frozen = (nn.Linear(6, 6) for _ in range(3))
            self.frozen.weight.requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.used(x))

    model = Idle()
    METHOD.step(model, SETTINGS).backward(lambda net: net(torch.randn(4, 6)).square().mean())
    ranks = truncate_network_(copy.deepcopy(model), with_overrides(SETTINGS, trp_energy=1.0))
    # ‖U_r V_rᵀ‖² = r
    torch.testing.assert_close(model.idle.weight.grad.norm().item(), 0.01 * math.sqrt(ranks["idle"]), rtol=1e-4, atol=0)
    assert model.frozen.weight.grad is None


def test_a_shared_kernel_is_truncated_once_and_its_gradient_gets_the_nuclear_norms_once():
    model = Shared()
    step = METHOD.step(model, SETTINGS)
    assert list(step.ranks) == ["stem", "one", "head"]
    step.backward(loss_of)
    assert model.one.weight is model.two.weight
    added = model.one.weight.grad.clone()
    model.zero_grad()
    loss_of(model).backward()
    added -= model.one.weight.grad
    torch.testing.assert_close(added.norm().item(), 0.01 * math.sqrt(step.ranks["one"]), rtol=1e-3, atol=0)


# Every T steps


def test_truncation_and_subgradient_come_every_third_step_and_never_in_between():
    model = cnn()
    step = METHOD.step(model, with_overrides(SETTINGS, trp_interval=3, trp_energy=0.8))
    truncated, regularised = [], []
    for number in range(8):
        with torch.no_grad():
            for weight in weights(model).values():
                weight.add_(0.01 * torch.randn_like(weight))  # full rank again
        before = {name: weight.detach().clone() for name, weight in weights(model).items()}
        model.zero_grad()
        step.backward(loss_of)
        if not all(torch.equal(before[name], weight) for name, weight in weights(model).items()):
            truncated.append(number)
        gradients = {name: weight.grad.clone() for name, weight in weights(model).items()}
        model.zero_grad()
        loss_of(model).backward()  # at the weights as they are now, truncated or not
        if not all(torch.equal(gradients[name], weight.grad) for name, weight in weights(model).items()):
            regularised.append(number)
    assert truncated == regularised == [0, 3, 6]


def test_the_loss_and_the_part_of_the_bases_that_is_left_are_logged():
    model = cnn()
    step = METHOD.step(model, with_overrides(SETTINGS, trp_interval=2))
    full = sum(layer.full_rank for layer in step.layers)
    first, second = step.backward(loss_of), step.backward(loss_of)
    assert list(first) == ["loss", "kept"]
    assert first["kept"] == second["kept"] == sum(step.ranks.values()) / full < 1
    assert not first["loss"].requires_grad


def descend(model, step, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        step.backward(loss_of)
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_run_that_is_resumed_between_two_truncations_has_the_same_bits(cut):
    settings = with_overrides(SETTINGS, trp_interval=3)
    whole = cnn()
    parts = copy.deepcopy(whole)
    step, optimizer = METHOD.step(whole, settings), sgd(whole)
    descend(whole, step, optimizer, 8)

    first, optimizer = METHOD.step(parts, settings), sgd(parts)
    descend(parts, first, optimizer, cut)
    resumed = cnn()
    resumed.load_state_dict(parts.state_dict())
    second, further = METHOD.step(resumed, settings), sgd(resumed)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    further.load_state_dict(optimizer.state_dict())
    descend(resumed, second, further, 8 - cut)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert second.state_dict() == step.state_dict()


def test_a_state_of_another_network_is_refused():
    step = METHOD.step(cnn(), SETTINGS)
    for state in ({}, {"steps": 3}, METHOD.step(Shared(), SETTINGS).state_dict()):
        with pytest.raises(InvalidArgumentError, match=r"^state: .*; allowed: what state_dict\(\) returned$"):
            step.load_state_dict(state)


def test_training_lowers_the_loss_and_the_ranks():
    model = cnn()
    step = METHOD.step(model, with_overrides(SETTINGS, trp_energy=0.98, trp_strength=0.03))
    optimizer, start = torch.optim.SGD(model.parameters(), lr=0.1), loss_of(model).item()
    kept = []
    for _ in range(40):
        optimizer.zero_grad()
        kept.append(step.backward(loss_of)["kept"])
        optimizer.step()
    assert loss_of(model).item() < 0.7 * start
    assert kept[-1] < kept[0]


# When things go wrong


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(bad):
    model = cnn()
    with torch.no_grad():
        model[3].weight[0, 0, 0, 0] = bad
    with pytest.raises(NonFiniteError, match=r"layer '3'.*NaN or infinity"):
        METHOD.step(model, SETTINGS).backward(loss_of)


def test_where_lapack_fails_the_step_is_a_plain_one_with_a_warning(monkeypatch):
    def fail(matrices):
        raise torch.linalg.LinAlgError("eigh: the algorithm failed to converge")

    model = cnn()
    before = copy.deepcopy(model.state_dict())
    step = METHOD.step(model, SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(trp, "svd", fail)
        with pytest.warns(UserWarning, match="does not truncate.*failed to converge"):
            logged = step.backward(loss_of)
    assert logged["kept"] == 1.0
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items() if "weight" in name)
    gradients = {name: weight.grad.clone() for name, weight in weights(model).items()}
    model.zero_grad()
    loss_of(model).backward()
    assert all(torch.equal(gradients[name], weight.grad) for name, weight in weights(model).items())
    assert step.backward(loss_of)["kept"] < 1  # and it goes on


# Which layers


def is_listed(name):
    return re.fullmatch(r"layer\d\.\d+\.conv\d", name)


@pytest.mark.parametrize("build", [models.resnet20, models.resnet34])
def test_inner_layers_of_a_residual_network_are_the_blocks_convolutions(build):
    with torch.device("meta"):
        model = build()
    expected = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and is_listed(n)]
    inner = [layer.name for layer in selected_layers(model, with_overrides(SETTINGS, trp_layers="inner"))]
    assert inner == expected
    assert len(inner) == {20: 18, 34: 32}[20 if build is models.resnet20 else 34]


def test_inner_layers_of_resnet50_are_its_sixteen_3_by_3_convolutions():
    with torch.device("meta"):
        model = models.resnet50()
    inner = [layer.name for layer in selected_layers(model, with_overrides(SETTINGS, trp_layers="inner"))]
    assert inner == [f"layer{i}.{j}.conv2" for i, depth in enumerate((3, 4, 6, 3), 1) for j in range(depth)]


def test_inner_layers_of_vgg15_are_all_convolutions_but_the_first():
    with torch.device("meta"):
        model = models.vgg15()
    inner = [layer.name for layer in selected_layers(model, with_overrides(SETTINGS, trp_layers="inner"))]
    assert inner == [f"conv{i}" for i in range(2, 14)]


@pytest.mark.parametrize(("build", "count"), [(models.resnet20, 20), (models.resnet50, 54), (models.vgg15, 15)])
def test_by_default_every_convolution_and_linear_layer_takes_part(build, count):
    with torch.device("meta"):
        model = build()
    assert len(selected_layers(model, SETTINGS)) == count


def test_inner_leaves_the_other_weights_alone():
    model = cnn()
    before = copy.deepcopy(model.state_dict())
    assert list(truncate_network_(model, with_overrides(SETTINGS, trp_layers="inner"))) == ["3", "7"]
    for name in ("0", "5", "9"):
        assert torch.equal(model.state_dict()[f"{name}.weight"], before[f"{name}.weight"])


def test_a_network_without_inner_layers_is_refused_in_one_line():
    with pytest.raises(InvalidArgumentError, match=r"^trp_layers=inner: .*; allowed: all$"):
        METHOD.step(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), with_overrides(SETTINGS, trp_layers="inner"))


# Sizes


def settled(model):
    """Statistics that batch normalisation could have after training."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    return model.eval()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:batch normalisation still has")
def test_at_its_own_ranks_the_sized_network_is_the_truncated_one(form):
    settings = replace(SETTINGS, form=form, calibrated_sizes=(1.0,))
    model, (x, _) = settled(cnn()), batch()
    before = copy.deepcopy(model.state_dict())
    net = METHOD.sized(model, material(x), settings)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # a copy was truncated
    twin = copy.deepcopy(model)
    ranks = truncate_network_(twin, settings)
    net.resize_(ranks=ranks)
    full, ours = twin(x), without_statistics(net, twin)(x)
    torch.testing.assert_close(ours, full, rtol=1e-4, atol=1e-5)


def without_statistics(net, model):
    """The plain network of the size with the batch normalisation statistics of a model."""
    module = net.extract().eval()
    for name, norm in model.named_modules():
        if isinstance(norm, nn.BatchNorm2d):
            module.get_submodule(name).load_state_dict(norm.state_dict())
    return module


@pytest.mark.parametrize("form", FORMS)
def test_above_its_own_ranks_the_curve_is_flat_and_below_it_is_not(form):
    """Without batch normalisation, so that sizes differ by their weights alone."""
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(24 * 64, 5),
    )  # fmt: skip
    settings = with_overrides(SETTINGS, form=form, trp_energy=0.5)
    x, _ = batch()
    net = METHOD.sized(model, material(x), settings)
    twin = copy.deepcopy(model)
    own = net.plan(ranks=truncate_network_(twin, settings))
    assert own.macs_fraction < 0.7
    spread = twin(x).std()
    sizes = [own.macs_fraction, (1 + own.macs_fraction) / 2, 0.99, 1.0]
    for size in sizes:
        net.resize_(macs=size)
        assert all(net.plan().ranks[name] >= rank for name, rank in own.ranks.items())
        assert (net(x) - twin(x)).abs().max() < 1e-5 * spread
    net.resize_(macs=0.6 * own.macs_fraction)
    assert (net(x) - twin(x)).abs().max() > 1e-2 * spread


def test_the_criterion_is_the_energy_whatever_the_settings_say():
    x, _ = batch()
    model = cnn()
    nets = [METHOD.sized(model, material(x), replace(SETTINGS, criterion=c)) for c in ("singular_value", "energy")]
    plans = [[net.plan(macs=size).ranks for size in (0.2, 0.4, 0.6)] for net in nets]
    assert plans[0] == plans[1]


def test_layers_that_training_left_alone_are_not_decomposed():
    x, _ = batch()
    net = METHOD.sized(cnn(), material(x), with_overrides(SETTINGS, trp_layers="inner"))
    assert list(net.plan().ranks) == ["3", "7"]
    assert set(net.skipped) == {"0", "5", "9"}


def test_shared_kernels_stay_shared():
    x, _ = batch()
    net = METHOD.sized(Shared(), material(x), SETTINGS)
    net.resize_(macs=0.5)
    module = net.extract()
    assert module.one[0].weight is module.two[0].weight
    assert net.plan().macs == macs(module, x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["small_cnn", pytest.param("resnet20", marks=pytest.mark.slow)])
def test_macs_and_parameters_of_every_size_are_those_of_the_network(kind, form):
    settings = with_overrides(SETTINGS, form=form, trp_energy=0.9, calibrated_sizes=(1.0,))
    if kind == "small_cnn":
        model, x = models.small_cnn((8, 12, 12, 16, 16)), torch.randn(4, 1, 8, 8)
    else:
        model, x = models.resnet20(), torch.randn(2, 3, 32, 32)
    net = METHOD.sized(model, material(x, batches=1), settings)
    assert (net.plan().full_macs, net.plan().full_params) == (
        macs(model, x),
        sum(p.numel() for p in model.parameters()),
    )
    for size in (1.0, 0.6, 0.3):
        plan, module = net.resize_(macs=size), net.extract()
        assert (plan.macs, plan.params) == (macs(module, x), sum(p.numel() for p in module.parameters()))
        assert plan.macs <= size * plan.full_macs


# A comparison


def test_a_comparison_trains_each_form_strength_and_energy():
    trainings = METHOD.trainings(
        with_overrides(Settings(), compare_energies=(0.999, 0.999995), compare_strengths=(1e-4, 3e-4))
    )
    assert [training.curve for training in trainings] == [
        f"trp_{form} {rest}"
        for form in ("sp", "ch")
        for rest in ("0.999-0.0001", "0.999995-0.0001", "0.999-0.0003", "0.999995-0.0003")
    ]
    assert trainings[2].folder == "sp-e0.999-tau0.0003"
    assert trainings[2].settings == {
        "form": "spatial", "trp_energy": 0.999, "trp_strength": 3e-4, "criterion": "energy",
    }  # fmt: skip
    assert all(re.fullmatch(r"[\w.-]+", training.folder) for training in trainings)


def test_names_do_not_meet_however_near_the_energies():
    energies = (0.999999, 0.9999995, 0.99999999, 1.0)
    trainings = METHOD.trainings(with_overrides(Settings(), compare_energies=energies, compare_forms=("channel",)))
    assert len({t.curve for t in trainings}) == len({t.folder for t in trainings}) == 8


def test_it_trains_the_model_itself():
    model = cnn()
    METHOD.check(SETTINGS, has_init=False)
    assert METHOD.network(model, torch.zeros(1, 3, 8, 8), SETTINGS, is_trained=False) is model
