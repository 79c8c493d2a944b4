import dataclasses
import itertools
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from decomposable import models
from decomposable.core.forms import form_for, to_matrix, to_weight
from decomposable.core.standin import StandIn
from decomposable.network.file.container import read_container
from decomposable.recipes.settings import Settings
from decomposable.training.methods.base import CalibrationData, PlainStep
from decomposable.training.methods.flat import with_overrides
from decomposable.training.weights import load_weights_
from decomposable_edge.errors import ArtifactError, BudgetError, InvalidArgumentError, NonFiniteError
from decomposable_lab.methods.sized import restored
from decomposable_lab.methods.tucker import CIFAR_GRID, IMAGENET_GRID, METHOD
from decomposable_lab.methods.tucker.layers import (
    Pair,
    decompose,
    decompose_again,
    empty_factors,
    factors_in,
    parameters_for,
    stand_in,
)
from decomposable_lab.methods.tucker.method import TuckerSettings
from decomposable_lab.methods.tucker.ranks import SMALLER, LayerRanks, Positions, Structure, is_dense, structure_of
from decomposable_lab.methods.tucker.tensors import Tucker2, decomposed_again, possible_ranks, tucker2, unfold
from decomposable_lab.methods.tucker.vbmf import vbmf

FORMS = ["tucker", "channel", "spatial"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def low_rank_tensor(shape, part):
    """Of Tucker ranks that are this part of the channels, but no less than 1, and with a spectrum that decays."""
    out_channels, in_channels, *kernel = shape
    ranks = [max(1, int(part * n)) for n in (out_channels, in_channels)]
    w = torch.einsum(
        "or,rsk,is->oik",
        torch.randn(out_channels, ranks[0]) * 0.8 ** torch.arange(ranks[0]),
        torch.randn(*ranks, math.prod(kernel)),
        torch.randn(in_channels, ranks[1]) * 0.8 ** torch.arange(ranks[1]),
    )
    return (w / w.std()).reshape(shape)


def low_rank_(model, part=0.25, noise=0.02):
    """Weights as if training had found few bases: low-rank, with a little noise."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                weight = low_rank_tensor(module.weight.shape, part)
                weight += noise * torch.randn_like(weight)
                module.weight.copy_(weight * (2 / module.weight[0].numel()) ** 0.5)
    return model


def small_net():
    """A first layer of 3 inputs, a stride, a 1×1 convolution, a bias, a depthwise layer and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 32, (3, 5), stride=(2, 1), padding=(1, 2)),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, groups=32),
        nn.Conv2d(32, 40, 1, stride=2),
        nn.BatchNorm2d(40),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(160, 30, bias=False),
        nn.ReLU(),
        nn.Linear(30, 10),
    )


def trained_by_hand(part=0.25, noise=0.02):
    model = low_rank_(small_net(), part, noise)
    with torch.no_grad():
        for _ in range(20):
            model.train()(torch.randn(32, 3, 12, 12))
    return model.eval()


def material(shape, batches=2, images=8):
    generator = torch.Generator().manual_seed(1)
    calibration = [(torch.randn(images, *shape, generator=generator), torch.arange(images)) for _ in range(batches)]

    def loss(net, batch):
        return F.cross_entropy(net(batch[0]), batch[1] % 10)

    return CalibrationData(example_input=torch.zeros(1, *shape), calibration=calibration, loss=loss)


def made(model, form="tucker", shape=(3, 12, 12), **settings):
    chosen = with_overrides(Settings(), method="tucker", vbmf_form=form, **settings)
    return METHOD.network(model, torch.zeros(1, *shape), chosen, is_trained=True), chosen


def counted_macs(module, x):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops() // 2


def relative(got, wanted):
    return float(((got - wanted).norm() / wanted.norm()).detach())


# Tucker-2


def error(w, tucker):
    return float((w - tucker.weight()).norm())


@pytest.mark.parametrize("shape", [(12, 10, 3, 3), (8, 20, 5, 1), (20, 6, 2, 4)], ids=str)
def test_tucker_at_full_rank_is_exact_and_factors_are_orthonormal(shape):
    w = torch.randn(shape, dtype=torch.float64)
    for ranks in [shape[:2], (shape[0], None), (None, shape[1]), (None, None)]:
        tucker = tucker2(w, ranks)
        assert relative(tucker.weight(), w) < 1e-12
    for ranks in [shape[:2], (5, 4), (3, None), (None, 2)]:
        tucker = tucker2(w, ranks)
        for matrix, rank in zip((tucker.u, tucker.v), ranks, strict=True):
            assert (matrix is None) == (rank is None)
            if rank is not None:
                assert matrix.shape[1] == rank
                torch.testing.assert_close(matrix.mT @ matrix, torch.eye(rank, dtype=w.dtype), atol=1e-10, rtol=0)


@pytest.mark.parametrize("ranks", [(5, 4), (1, 1), (8, 2), (3, None), (None, 3)], ids=str)
def test_the_error_of_tucker_is_what_the_core_lacks(ranks):
    w = torch.randn(10, 9, 3, 3, dtype=torch.float64)
    tucker = tucker2(w, ranks)
    lacking = math.sqrt(float(w.square().sum() - tucker.core.square().sum()))
    assert error(w, tucker) == pytest.approx(lacking, rel=1e-9)


@pytest.mark.parametrize("ranks", [(5, 4), (2, 2), (9, 3)], ids=str)
def test_iterating_lowers_the_error_and_beats_the_truncated_hosvd(ranks):
    w = torch.randn(16, 12, 3, 3, dtype=torch.float64)
    u, v = (torch.linalg.svd(unfold(w, mode))[0][:, :rank] for mode, rank in enumerate(ranks))
    hosvd = Tucker2(torch.einsum("oihw,or,is->rshw", w, u, v), u, v)
    errors = [error(w, tucker2(w, ranks, tolerance=0.0, max_iterations=n)) for n in range(1, 12)]
    assert errors[0] <= error(w, hosvd) + 1e-9
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(errors))
    assert error(w, tucker2(w, ranks)) <= errors[0] + 1e-9


@pytest.mark.parametrize(
    ("shape", "ranks"), [((16, 12, 3, 3), (5, 4)), ((32, 24, 3, 3), (8, 12)), ((10, 40, 1, 5), (4, 9))], ids=str
)
@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_tucker_is_as_good_as_tensorly(shape, ranks, noise):
    pytest.importorskip("tensorly")
    from tensorly import tenalg
    from tensorly.decomposition import partial_tucker

    w = low_rank_tensor(shape, 0.3).double()
    w += noise * torch.randn_like(w)
    (core, factors), _ = partial_tucker(w.numpy(), rank=list(ranks), modes=[0, 1], n_iter_max=200, tol=1e-8)
    theirs = torch.from_numpy(tenalg.multi_mode_dot(core, factors, modes=[0, 1]))
    assert error(w, tucker2(w, ranks)) <= float((w - theirs).norm()) * (1 + 1e-4)


def test_ranks_that_the_other_mode_does_not_allow_are_cut():
    w = torch.randn(40, 8, 2, 2, dtype=torch.float64)
    tucker = tucker2(w, (40, 2))
    assert tucker.core.shape == (8, 2, 2, 2)
    assert possible_ranks((40, 8, 2, 2), (1, 8)) == (1, 4)
    half = tucker2(w, (None, 2))  # the output mode whole: no better
    assert error(w, tucker) == pytest.approx(error(w, half), rel=1e-6)


def test_a_zero_weight_decomposes():
    tucker = tucker2(torch.zeros(6, 5, 3, 3), (2, 2))
    assert not tucker.weight().any()
    assert torch.isfinite(tucker.u).all()


@pytest.mark.parametrize("before", [(9, 7), (9, None), (None, 7), (None, None)], ids=str)
@pytest.mark.parametrize("ranks", [(4, 3), (4, None), (None, 3)], ids=str)
def test_decomposing_again_is_decomposing_the_weight_that_the_factors_stand_for(before, ranks):
    """After training the factors are any matrices; the small problem has the solution of the large one."""
    start = tucker2(torch.randn(12, 10, 3, 3, dtype=torch.float64), before)
    trained = Tucker2(*(None if t is None else t + 0.1 * torch.randn_like(t) for t in start))
    again = decomposed_again(trained, ranks)
    direct = tucker2(trained.weight(), ranks)
    assert relative(again.weight(), direct.weight()) < 1e-2  # both iterated to a tolerance
    assert error(trained.weight(), again) == pytest.approx(error(trained.weight(), direct), rel=1e-4)
    assert (again.u is None, again.v is None) == (ranks[0] is None, ranks[1] is None)


@pytest.mark.parametrize("form", ["channel", "spatial"])
def test_decomposing_two_factors_again_is_the_svd_of_their_product(form):
    w = torch.randn(12, 10, 3, 3, dtype=torch.float64)
    trained = Pair(*(t + 0.1 * torch.randn_like(t) for t in decompose(w, form, (8,))))
    again = decompose_again(trained, (3,))
    u, s, vt = torch.linalg.svd(trained.p @ trained.q)
    torch.testing.assert_close(again.p @ again.q, u[:, :3] * s[:3] @ vt[:3])
    torch.testing.assert_close(again.p.norm(dim=0), s[:3].sqrt())  # √σ on both sides
    torch.testing.assert_close(again.q.norm(dim=1), s[:3].sqrt())


# Layers

GEOMETRIES = {
    "plain": {"kernel_size": 3},
    "stride, padding": {"kernel_size": 3, "stride": 2, "padding": 1},
    "no bias": {"kernel_size": 3, "padding": 1, "bias": False},
    "dilation": {"kernel_size": 3, "dilation": (2, 1), "padding": (2, 0)},
    "not square": {"kernel_size": (2, 5), "stride": (1, 3), "padding": (1, 2)},
    "same": {"kernel_size": (4, 3), "padding": "same"},
    "reflect": {"kernel_size": 3, "padding": (2, 1), "padding_mode": "reflect"},
    "circular": {"kernel_size": 5, "padding": 2, "stride": 2, "padding_mode": "circular"},
    "replicate": {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"},
}


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("kept", [(9, 7), (9, None), (None, 7)], ids=str)
def test_tucker_layers_at_full_rank_are_the_convolution(geometry, kept):
    conv = nn.Conv2d(7, 9, **geometry)
    factors = decompose(conv.weight, "tucker", kept)
    layers = stand_in(conv, "tucker", kept, parameters_for(conv.weight.shape, "tucker", factors, conv.weight))
    x = torch.randn(2, 7, 13, 11)
    torch.testing.assert_close(layers(x), conv(x), atol=1e-5, rtol=1e-5)
    assert [type(layer) for layer in layers] == [nn.Conv2d] * (3 - kept.count(None))
    assert [layer.bias is not None for layer in layers][:-1] == [False] * (len(layers) - 1)
    assert layers[-1].bias is conv.bias


@pytest.mark.parametrize(
    ("form", "kept"), [("tucker", (4, 3)), ("tucker", (4, None)), ("channel", (5,)), ("spatial", (5,))]
)
def test_layers_say_which_factors_they_have(form, kept):
    conv = nn.Conv2d(7, 9, (3, 2))
    factors = decompose(conv.weight, form, kept)
    layers = stand_in(conv, form, kept, parameters_for(conv.weight.shape, form, factors, conv.weight))
    found = factors_in(layers, form, kept)
    for one, other, empty in zip(found, factors, empty_factors(conv.weight.shape, form, kept), strict=True):
        if other is None:
            assert one is None and empty is None  # noqa: PT018
        else:
            torch.testing.assert_close(one, other.float())
            assert empty.shape == one.shape
    assert all(type(p) is nn.Parameter and p.requires_grad for p in layers.parameters())


# The network


def test_ranks_are_those_of_vbmf():
    model = trained_by_hand()
    for form in FORMS:
        structure = structure_of(model, torch.zeros(1, 3, 12, 12), form)
        assert [layer.name for layer in structure.layers] == ["0", "3", "6", "11"]  # neither depthwise nor the last
        for layer in structure.layers:
            weight = model.get_submodule(layer.name).weight.detach()
            if layer.form == "tucker":
                wanted = [
                    None if n <= 4 else max(1, vbmf(unfold(weight, i)).rank) for i, n in enumerate(weight.shape[:2])
                ]
            else:
                wanted = [max(1, vbmf(to_matrix(weight, form_for(weight.shape, layer.form))).rank)]
            assert list(layer.ranks) == wanted
    assert [layer.form for layer in structure_of(model, torch.zeros(1, 3, 12, 12), "tucker").layers] == [
        "tucker",
        "tucker",
        "channel",
        "channel",
    ]


@pytest.mark.parametrize("form", FORMS)
def test_layers_of_low_rank_are_reproduced_with_few_weights(form):
    """Weights of low rank plus next to no noise: VBMF sees the ranks, and the output stays."""
    model = trained_by_hand(noise=1e-4)
    network, _ = made(model, form)
    x = torch.randn(16, 3, 12, 12)
    assert relative(network(x), model(x)) < 5e-3
    structure = structure_of(model, x[:1], form)
    assert structure.size(1.0).macs_fraction < 0.7
    if form == "tucker":
        assert structure.layers[1].ranks == (8, 6)  # a quarter of 32 and of 24
        assert [type(m).__name__ for m in network] == [
            *("Sequential", "BatchNorm2d", "ReLU", "Sequential", "ReLU", "Conv2d"),
            *("StandIn", "BatchNorm2d", "ReLU", "AdaptiveAvgPool2d", "Flatten", "StandIn", "ReLU", "Linear"),
        ]
        assert [len(network[i]) for i in (0, 3, 6, 11)] == [2, 3, 2, 2]  # the three colours are left whole


def test_the_model_is_left_as_it_was_and_shares_nothing():
    model = trained_by_hand()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    network, _ = made(model)
    with torch.no_grad():
        for tensor in [*network.parameters(), *network.buffers()]:
            tensor.add_(1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_layers_that_would_cost_more_stay_dense():
    """A rank of VBMF is below MN/(M+N), so two factors pay but where the stride comes late, or the least rank is 1."""
    model = nn.Sequential(
        nn.Conv2d(6, 8, 3, stride=(4, 1), padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1), nn.Flatten(), nn.Linear(16, 1)
    )
    with torch.no_grad():
        u, s, vt = torch.linalg.svd(to_matrix(model[0].weight, "spatial"), full_matrices=False)
        model[0].weight.copy_(to_weight(u * torch.logspace(4, 0, len(s)) @ vt, model[0].weight.shape, "spatial"))
    x = torch.randn(2, 6, 8, 8)
    dense = {}
    for form in FORMS:
        network, _ = made(model, form, shape=(6, 8, 8))
        structure = structure_of(model, x[:1], form)
        for layer in structure.layers:
            kept = layer.kept(1.0)
            assert layer.macs(kept) <= layer.macs((None,) * len(kept))
            is_plain = isinstance(network.get_submodule(layer.name), nn.Conv2d | nn.Linear)
            assert is_plain == is_dense(kept)
        dense[form] = [layer.name for layer in structure.layers if is_dense(layer.kept(1.0))]
        assert counted_macs(network, x[:1]) == structure.size(1.0).macs
        assert structure.size(1.0).macs <= structure.size(1.0).full_macs == counted_macs(model, x[:1])
    assert dense == {"tucker": ["2"], "channel": ["2"], "spatial": ["0", "2"]}


@pytest.mark.parametrize("stride", [1, 2])
def test_kept_is_the_cheapest_of_all_arrangements(stride):
    positions = Positions(inputs=64, between=64 // stride, outputs=64 // stride**2)
    layer = LayerRanks(
        name="a", modules=("a",), shape=(16, 12, 3, 3), form="tucker", ranks=(9, 11), positions=positions
    )
    i, s, r, o, p, q = 12, 11, 9, 16, 64, positions.outputs
    costs = {
        (9, 11): i * s * p + s * r * 9 * q + r * o * q,
        (9, None): i * r * 9 * q + r * o * q,
        (None, 11): i * s * p + s * o * 9 * q,
        (None, None): i * o * 9 * q,
    }
    assert {kept: layer.macs(kept) for kept in costs} == costs
    assert layer.kept(1.0) == min(costs, key=costs.__getitem__) == (9, None)


def test_layers_that_share_a_weight_share_its_factors():
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
    low_rank_(model, noise=1e-4)
    model[2].weight = model[0].weight
    x = torch.randn(2, 16, 6, 6)
    for form in FORMS:
        network, chosen = made(model, form, shape=(16, 6, 6))
        assert network[2][0].weight is network[0][0].weight
        assert network[2][-1].bias is not network[0][-1].bias
        assert relative(network(x), model(x)) < 1e-2
        sized = METHOD.sized(network, material((16, 6, 6)), chosen)
        for size in sized.sizes:
            sized.resize_(size)
            module = sized.extract()
            assert sum(p.numel() for p in module.parameters()) == size.params
            assert counted_macs(module, x[:1]) == size.macs


def test_frozen_weights_and_types_stay():
    model = trained_by_hand().double()
    model[3].weight.requires_grad_(False)
    network, _ = made_in_double(model)
    assert all(p.dtype == torch.float64 for p in network.parameters())
    assert [p.requires_grad for p in network[3].parameters()] == [False, False, False, True]


def made_in_double(model):
    settings = with_overrides(Settings(), vbmf_form="tucker")
    return METHOD.network(model, torch.zeros(1, 3, 12, 12).double(), settings, is_trained=True), settings


def test_channels_last_stays():
    model = trained_by_hand().to(memory_format=torch.channels_last)
    network, chosen = made(model, sizes=(0.05,))
    sized = METHOD.sized(network, material((3, 12, 12)), chosen)
    for module in (network, *(sized._build(size) for size in sized.sizes)):
        assert all(p.is_contiguous(memory_format=torch.channels_last) for p in module.parameters() if p.dim() == 4)


def test_a_model_that_is_one_layer():
    model = low_rank_(nn.Conv2d(16, 16, 3), noise=1e-4)
    network, chosen = made(model, shape=(16, 8, 8), sizes=(0.05,))
    x = torch.randn(2, 16, 8, 8)
    assert relative(network(x), model(x)) < 1e-2
    assert len(METHOD.sized(network, material((16, 8, 8)), chosen).sizes) == 2


def test_untrained_weights_are_refused():
    for call in (
        lambda: METHOD.check(Settings(method="tucker"), has_init=False),
        lambda: METHOD.network(small_net(), torch.zeros(1, 3, 12, 12), Settings(), is_trained=False),
    ):
        with pytest.raises(InvalidArgumentError, match=r"allowed: --init with the weights of a trained network") as e:
            call()
        assert "\n" not in str(e.value)
    METHOD.check(Settings(method="tucker"), has_init=True)


def test_weights_that_are_not_finite_are_named():
    model = small_net()
    with torch.no_grad():
        model[3].weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="layer '3'"):
        made(model)


def test_the_classifier_stays_as_it_is():
    network, chosen = made(trained_by_hand(), sizes=(0.1,))
    assert isinstance(network[13], nn.Linear)
    sized = METHOD.sized(network, material((3, 12, 12)), chosen)
    for size in sized.sizes:
        sized.resize_(size)
        assert torch.equal(sized.module[13].weight, network[13].weight)
    with pytest.raises(InvalidArgumentError, match="'0': the last layer"):
        made(nn.Sequential(nn.Linear(20, 20)), shape=(20,))
    convolution_last, _ = made(low_rank_(nn.Sequential(nn.Conv2d(16, 16, 3)), noise=1e-4), shape=(16, 8, 8))
    assert isinstance(convolution_last[0], nn.Sequential)


def test_a_trained_network(shared_data):
    """A ResNet-20 that somebody trained on CIFAR-10; VBMF finds nothing in its classifier."""
    model = models.resnet20()
    load_weights_(model, shared_data / "resnet20-12fca82f.th")
    assert vbmf(model.linear.weight.detach()).rank == 0
    for form, ranks in (("tucker", (26, 21)), ("spatial", (36,))):
        structure = structure_of(model.eval(), torch.zeros(1, 3, 32, 32), form)
        assert structure.layers[-1].ranks == ranks
        assert structure.size(1.0).full_macs == 40_551_040
        assert 0.15 < structure.size(1.0).macs_fraction < 0.35


def test_a_model_with_nothing_to_decompose_is_refused():
    with pytest.raises(InvalidArgumentError, match="no layer to decompose"):
        made(nn.Sequential(nn.Conv2d(4, 4, 3, groups=4)), shape=(4, 5, 5))


def test_fine_tuning_lowers_the_loss():
    model = trained_by_hand(noise=0.3)
    network, chosen = made(model)
    x = torch.randn(64, 3, 12, 12)
    y = model(x).argmax(dim=1)
    step = METHOD.step(network.train(), chosen)
    assert isinstance(step, PlainStep)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        losses.append(float(step.backward(lambda net: F.cross_entropy(net(x), y))["loss"]))
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


# Sizes


def rank_part(part):
    """In place of VBMF: a part of the full ranks."""

    def choose(layers, form):
        found = {}
        for layer in layers:
            if form == "tucker" and layer.form == "channel" and math.prod(layer.shape[2:]) > 1:
                found[layer.name] = tuple(None if n <= 4 else math.ceil(part * n) for n in layer.shape[:2])
            else:
                found[layer.name] = (math.ceil(part * layer.full_rank),)
        return found

    return choose


def check_costs(module, size, x):
    assert counted_macs(module.eval(), x) == size.macs
    assert sum(p.numel() for p in module.parameters()) == size.params
    assert size.macs_fraction == pytest.approx(size.macs / size.full_macs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "shape"), [("small_cnn", (1, 8, 8)), pytest.param("resnet20", (3, 16, 16), marks=pytest.mark.slow)]
)
def test_costs_of_every_size_are_what_a_count_of_the_exported_module_says(name, shape, form):
    model = low_rank_(getattr(models, name)()).eval()
    x = torch.zeros(1, *shape)
    network, chosen = made(model, form, shape=shape, sizes=(0.5, 0.3, 0.2, 0.1, 0.05))
    sized = METHOD.sized(network, material(shape), chosen)
    assert len(sized.sizes) >= 3
    assert sized.sizes[0].name == "VBMF ranks"
    for size in sized.sizes:
        assert (size.full_macs, size.full_params) == (
            counted_macs(model, x),
            sum(p.numel() for p in model.parameters()),
        )
        sized.resize_(size)
        check_costs(sized.extract(), size, x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("resnet34", (3, 8, 8), marks=pytest.mark.slow),
        ("vgg15", (3, 32, 32)),
        pytest.param("resnet50", (3, 32, 32), marks=pytest.mark.slow),
    ],
)
def test_costs_of_large_networks(name, shape, form):
    """At ranks given by hand: the SVDs of VBMF would take most of the time, and the costs depend on shapes only."""
    model = models.build(name).eval()
    x = torch.zeros(1, *shape)
    structure = structure_of(model, x, form, rank_part(0.1))
    network, build = METHOD.rebuilt(model, x, Settings(), json.loads(json.dumps(structure.as_json())))
    for part in (1.0, 0.2):
        size = structure.size(part)
        check_costs(build(size), size, x)
    check_costs(network, structure.size(1.0), x)
    assert structure.size(1.0).full_macs == counted_macs(model, x)
    assert structure.size(1.0).full_params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_sizes_are_the_largest_parts_of_the_ranks_within_each_budget(form):
    budgets = (1.0, 0.4, 0.3, 0.3001, 0.2, 0.1, 0.08, 0.05, 1e-6)
    structure = structure_of(low_rank_(models.resnet20()).eval(), torch.zeros(1, 3, 8, 8), form)
    sizes = structure.sizes(budgets)
    assert sizes[0] == structure.size(1.0)
    assert len({size.macs for size in sizes}) == len(sizes) > 2
    grid = [structure.size(i / 2000) for i in range(1, 2001)]
    assert [size.macs for size in grid] == sorted(size.macs for size in grid)  # monotone in ρ
    assert [size.params for size in grid] == sorted(size.params for size in grid)
    for size in sizes[1:]:
        fitting = [b * size.full_macs for b in budgets if size.macs <= b * size.full_macs < sizes[0].macs]
        assert fitting
        assert max(g.macs for g in grid if g.macs <= min(fitting)) <= size.macs
        assert size.name == f"{size.value:.4g} of the VBMF ranks"
    assert all(structure.sizes([size.macs_fraction])[-1] == size for size in sizes[1:])
    by_default = structure.sizes([1.0, 0.95])
    assert [size.macs <= part * sizes[0].macs for size, part in zip(by_default[1:], SMALLER, strict=True)] == [True] * 3


def test_the_ranks_of_a_part():
    positions = Positions(inputs=100, between=100, outputs=100)
    layer = LayerRanks(
        name="a", modules=("a",), shape=(256, 64, 3, 3), form="tucker", ranks=(49, 10), positions=positions
    )
    assert layer.kept(1.0) == (49, 10)
    assert layer.kept(3 / 49) == (3, 1)
    assert [layer.kept(m / 49)[0] for m in range(1, 9)] == list(range(1, 9))
    assert layer.kept(1e-9) == (1, 1)


def test_layers_that_were_dense_are_factored_where_a_part_of_their_ranks_pays():
    positions = Positions(inputs=1, between=1, outputs=1)
    layer = LayerRanks(name="a", modules=("a",), shape=(20, 20), form="channel", ranks=(12,), positions=positions)
    assert layer.kept(1.0) == (None,)
    assert layer.kept(0.5) == (6,)
    structure = Structure(layers=(layer,), fixed_macs=0, fixed_params=0)
    model = low_rank_(nn.Sequential(nn.Linear(20, 20)), part=0.3)
    renamed = dataclasses.replace(structure, layers=(dataclasses.replace(layer, name="0", modules=("0",)),))
    network, build = METHOD.rebuilt(model, torch.zeros(1, 20), Settings(), renamed.as_json())
    assert isinstance(network[0], nn.Linear)
    smaller = build(renamed.size(0.5))
    assert [m.out_features for m in smaller[0]] == [6, 20]
    x = torch.randn(8, 20)
    assert relative(smaller(x), model(x)) < 0.05


def tuned(form, **settings):
    """A decomposed network whose every weight was changed by a few steps, as by fine-tuning."""
    network, chosen = made(trained_by_hand(noise=0.1), form, **settings)
    data = material((3, 12, 12), batches=3, images=32)
    optimizer = torch.optim.SGD(network.train().parameters(), lr=0.01)
    for batch in data.calibration:
        optimizer.zero_grad()
        data.loss(network, batch).backward()
        optimizer.step()
    return network.eval(), data, chosen


@pytest.mark.parametrize("form", FORMS)
def test_the_tuned_size_is_the_network_itself_and_smaller_ones_are_close_to_it(form):
    network, data, chosen = tuned(form, sizes=(0.3, 0.2, 0.1, 0.05))
    sized = METHOD.sized(network, data, chosen)
    x = torch.randn(32, 3, 12, 12)
    outputs = []
    for size in sized.sizes:
        sized.resize_(size)
        outputs.append(sized(x))
    assert torch.equal(outputs[0], network(x))  # with its own statistics
    errors = [relative(y, outputs[0]) for y in outputs]
    assert 0 < errors[1] < errors[-1]
    macs = [size.macs for size in sized.sizes]
    assert macs == sorted(macs, reverse=True)


@pytest.mark.parametrize("form", FORMS)
def test_smaller_sizes_have_statistics_of_their_own(form):
    network, data, chosen = tuned(form, sizes=(0.1,))
    sized = METHOD.sized(network, data, chosen)
    sized.resize_(macs=0.1)
    seen = []
    handle = sized.module[1].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    with torch.no_grad():
        for batch in data.calibration:
            sized(batch[0])
    handle.remove()
    torch.testing.assert_close(sized.module[1].running_mean, torch.cat(seen).mean(dim=(0, 2, 3)), atol=1e-4, rtol=1e-3)


def test_resizing_takes_the_largest_size_that_fits():
    network, data, chosen = tuned("tucker", sizes=(0.2, 0.1, 0.05))
    sized = METHOD.sized(network, data, chosen)
    assert sized.resize_(macs=1.0).value == 1
    costs = [sized.resize_(macs=budget).macs for budget in (0.1, 0.2, 1.0)]
    assert costs == sorted(costs)
    assert all(cost <= budget * sized.plan().full_macs for cost, budget in zip(costs, (0.1, 0.2, 1.0), strict=True))
    with pytest.raises(BudgetError, match="of the VBMF ranks"):
        sized.resize_(macs=1e-4)


def test_the_network_may_be_trained_on_without_changing_the_sizes():
    network, data, chosen = tuned("tucker", sizes=(0.1,))
    sized = METHOD.sized(network, data, chosen)
    x = torch.randn(4, 3, 12, 12)
    sized.resize_(macs=0.1)
    before = sized(x)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    sized.resize_(macs=0.1)
    assert torch.equal(sized(x), before)


@pytest.mark.parametrize("form", FORMS)
def test_an_extracted_size_is_a_plain_module_of_its_own(form):
    network, data, chosen = tuned(form, sizes=(0.1,))
    sized = METHOD.sized(network, data, chosen)
    x = torch.randn(4, 3, 12, 12)
    for size in sized.sizes:
        sized.resize_(size)
        wanted, module = sized(x), sized.extract()
        assert {type(m).__module__.split(".")[0] for m in module.modules() if type(m) is not StandIn} == {"torch"}
        assert not [name for name in vars(module) if "vbmf" in name]
        pointers = {t.data_ptr() for net in (network, sized) for t in [*net.parameters(), *net.buffers()]}
        assert not pointers & {t.data_ptr() for t in [*module.parameters(), *module.buffers()]}
        assert all(p.requires_grad for p in module.parameters())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        assert torch.equal(sized(x), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_gives_every_size_again(form, tmp_path):
    network, data, chosen = tuned(form, sizes=(0.2, 0.1))
    sized = METHOD.sized(network, data, chosen)
    sized.save(tmp_path / "net.safetensors", info={"about": "a test"})
    description, tensors = read_container(tmp_path / "net.safetensors")
    fresh = small_net()
    rebuilt, build = METHOD.rebuilt(fresh, data.example_input, chosen, description["structure"])
    loaded = restored(tmp_path / "net.safetensors", description, tensors, rebuilt, build).eval()
    assert (loaded.sizes, loaded.structure["layers"]) == (sized.sizes, description["structure"]["layers"])
    x = torch.randn(4, 3, 12, 12)
    for size in sized.sizes:
        sized.resize_(size)
        loaded.resize_(size)
        assert torch.equal(loaded(x), sized(x))
    loaded.resize_(sized.sizes[0])  # the size in force is stored, too
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "net.safetensors").read_bytes()


def test_a_file_of_another_model_is_refused():
    structure = structure_of(trained_by_hand(), torch.zeros(1, 3, 12, 12), "tucker").as_json()
    other = small_net()
    other[3] = nn.Conv2d(24, 16, 3)
    with pytest.raises(ArtifactError, match=r"layer '3' has a weight of shape \(32, 24, 3, 5\)"):
        METHOD.rebuilt(other, torch.zeros(1, 3, 12, 12), Settings(), structure)
    other[3] = nn.Identity()
    with pytest.raises(ArtifactError, match="the model has none"):
        METHOD.rebuilt(other, torch.zeros(1, 3, 12, 12), Settings(), structure)
    with pytest.raises(ArtifactError, match="damaged"):
        METHOD.rebuilt(small_net(), torch.zeros(1, 3, 12, 12), Settings(), {"layers": []})


def test_a_run_that_goes_on_makes_the_same_network():
    """After a resume, network() is called again with the same weights, and the state of the checkpoint loaded."""
    model = trained_by_hand()
    one, _ = made(model)
    other, chosen = made(model)
    assert {k: v.shape for k, v in one.state_dict().items()} == {k: v.shape for k, v in other.state_dict().items()}
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.add_(0.01)
    other.load_state_dict(one.state_dict())
    x = torch.randn(2, 3, 12, 12)
    sized = METHOD.sized(other, material((3, 12, 12)), chosen)
    assert torch.equal(sized(x), one.eval()(x))


def test_a_network_of_another_method_has_no_sizes_here():
    with pytest.raises(InvalidArgumentError, match="did not decompose"):
        METHOD.sized(small_net(), material((3, 12, 12)), Settings())


def test_sizes_move_together():
    network, data, chosen = tuned("tucker", sizes=(0.1,))
    sized = METHOD.sized(network, data, chosen)
    sized.resize_(macs=0.1)
    x = torch.randn(4, 3, 12, 12)
    wanted = sized(x)
    sized.double()
    torch.testing.assert_close(sized(x.double()).float(), wanted, atol=1e-4, rtol=1e-3)


# What a comparison trains


def test_trainings_are_the_grid_for_each_form():
    settings = with_overrides(Settings(), tuning_rates=(0.01, 0.001), tuning_schedules=("polynomial:1.5", "steps:0.2"))
    trainings = METHOD.trainings(settings)
    assert len(trainings) == 3 * 2 * 1 * 2
    assert trainings[0].folder == "tucker-lr0.01-wd0.001-polynomial1.5"
    assert {t.curve for t in trainings} == {"tucker_vbmf_ft", "ch_vbmf_ft", "sp_vbmf_ft"}
    assert {t.init for t in trainings} == {"plain"}
    for training in trainings:
        chosen = with_overrides(settings, training.settings)
        assert chosen.epochs == settings.of(TuckerSettings).tuning_epochs == 15
        assert chosen.learning_rate == chosen.fine_tune_learning_rate
        assert f"{chosen.of(TuckerSettings).vbmf_form}-{training.choice}" == training.folder
        assert chosen.schedule in training.folder


@pytest.mark.parametrize(("grid", "count"), [(CIFAR_GRID, 96), (IMAGENET_GRID, 8)])
def test_the_grids_of_the_paper_are_settings(grid, count):
    trainings = METHOD.trainings(with_overrides(Settings(), grid))
    folders = {t.folder for t in trainings}
    assert len(folders) == len(trainings) == 3 * count
    assert all(set(folder) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") for folder in folders)


def test_points_that_are_given_twice_are_trained_once():
    assert (
        len(METHOD.trainings(with_overrides(Settings(), tuning_rates=(0.01, 0.01), compare_vbmf_forms=("tucker",))))
        == 1
    )
