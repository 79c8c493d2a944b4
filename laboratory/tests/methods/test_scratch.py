"""The factored network at given ranks: its modules, its cost, its first weights, and its file."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from decomposable import decompose, models
from decomposable.core.standin import StandIn
from decomposable.network.file.container import read_container
from decomposable.recipes.settings import Settings
from decomposable.training import methods
from decomposable.training.methods.base import CalibrationData
from decomposable.training.methods.flat import with_overrides
from decomposable_edge.errors import ArtifactError, DecomposableError, InvalidArgumentError, NonFiniteError
from decomposable_lab.methods.scratch import METHOD, ScratchSettings
from decomposable_lab.methods.sized import restored

SETTINGS = with_overrides(Settings(), method="scratch", ranks=(9, 7, 4, 2))
FORMS = ["spatial", "channel"]
IMAGE = (1, 3, 8, 8)

pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation still has")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def cnn():
    """For images of 3 × 8 × 8; the full ranks are 9, 30, 8, 7 (spatial) and 10, 12, 8, 7 (channel)."""
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1, bias=False),
        nn.BatchNorm2d(10),
        nn.ReLU(),
        nn.Conv2d(10, 12, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 8, 1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 7),
    )


def images(count=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *IMAGE[1:], generator=generator), torch.arange(count) % 5


def loss_of(net):
    x, y = images()
    return F.cross_entropy(net(x), y)


def factored(model, settings=SETTINGS, x=None, is_trained=False):
    return METHOD.network(model, torch.zeros(IMAGE) if x is None else x, settings, is_trained=is_trained)


def material(x):
    return CalibrationData(
        example_input=x[:1], calibration=[], loss=lambda net, pair: F.cross_entropy(net(pair[0]), pair[1])
    )


def macs(module, x):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x[:1])
    return counter.get_total_flops() / 2


def count(module):
    return sum(p.numel() for p in module.parameters())


def product(pair):
    """The one weight that a pair stands for."""
    first, second = (part.weight.detach().double() for part in pair)
    if first.dim() == 2:
        return second @ first
    both = torch.einsum("orac,ribd->oiabcd", second, first)
    o, i, h2, h1, w2, w1 = both.shape
    return both.reshape(o, i, h2 * h1, w2 * w1)


# The modules


def test_layers_become_pairs_and_those_of_full_rank_stay_dense():
    model = cnn()
    network = factored(model)
    assert network[0].weight is model[0].weight  # rank 9 of 9
    shapes = [[tuple(part.weight.shape) for part in network[i]] for i in (3, 5, 8)]
    assert shapes == [
        [(7, 10, 1, 3), (12, 7, 3, 1)],
        [(4, 12, 1, 1), (8, 4, 1, 1)],
        [(2, 128), (7, 2)],
    ]
    assert (network[3][0].stride, network[3][0].padding) == ((1, 2), (0, 1))
    assert (network[3][1].stride, network[3][1].padding) == ((2, 1), (1, 0))
    assert [type(m) for m in network[3]] == [nn.Conv2d, nn.Conv2d]
    assert network[3][0].bias is None
    assert network[3][1].bias is model[3].bias
    assert network(torch.zeros(2, 3, 8, 8)).shape == (2, 7)


def test_the_channel_form():
    network = factored(cnn(), replace(SETTINGS, form="channel"))
    assert [tuple(part.weight.shape) for part in network[3]] == [(7, 10, 3, 3), (12, 7, 1, 1)]
    assert network[3][0].stride == (2, 2)


def test_the_model_is_left_as_it_is():
    model = cnn()
    before = copy.deepcopy(model.state_dict())
    modules = [id(module) for module in model.modules()]
    factored(model)
    assert [id(module) for module in model.modules()] == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_every_factor_is_a_trainable_parameter():
    network = factored(cnn().requires_grad_(True))
    names = dict(network.named_parameters())
    assert {"3.0.weight", "3.1.weight", "3.1.bias", "8.0.weight"} <= names.keys()
    assert all(p.requires_grad and p.is_leaf for p in names.values())
    loss_of(network).backward()
    assert all(p.grad is not None for p in names.values())


def test_full_ranks_give_the_model_itself():
    model, (x, _) = cnn().eval(), images()
    network = factored(model, with_overrides(SETTINGS, ranks=(9, 30, 8, 7)))
    assert torch.equal(network(x), model(x))
    sized = METHOD.sized(network, material(x), SETTINGS)
    assert (sized.plan().macs_fraction, sized.plan().params_fraction, sized.plan().name) == (1.0, 1.0, "full ranks")


def test_layers_that_share_a_weight_share_their_factors():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(F.relu(self.one(x)))

    model, x = Shared(), torch.randn(1, 6)
    network = factored(model, with_overrides(SETTINGS, ranks=(2,)), x)
    assert network.one[0].weight is network.two[0].weight
    assert network.one[1].weight is network.two[1].weight
    sized = METHOD.sized(network, material(x), SETTINGS)
    assert (sized.plan().macs, sized.plan().params) == (macs(network, x), count(network)) == (48, 36)
    assert (sized.plan().full_macs, sized.plan().full_params) == (macs(model, x), count(model))


def test_a_network_that_is_one_layer():
    model, x = nn.Linear(8, 6), torch.randn(3, 8)
    network = factored(model, with_overrides(SETTINGS, ranks=(2,)), x)
    sized = METHOD.sized(network, material(x), with_overrides(SETTINGS, ranks=(2,)))
    assert (sized.plan().macs, sized.plan().full_macs) == (28, 48)
    assert torch.equal(sized(x), network(x))


def test_layers_that_no_form_fits_are_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.Conv2d(8, 4, 1))
    network = factored(model, with_overrides(SETTINGS, ranks=(3, 2)))
    assert [type(module) for module in network] == [StandIn, nn.Conv2d, StandIn]


def test_channels_last_is_kept():
    model = cnn().to(memory_format=torch.channels_last)
    network = factored(model)
    assert network[3][0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not network[3][0].weight.is_contiguous()
    plain = factored(cnn())
    plain.load_state_dict(network.state_dict())
    x, _ = images()
    torch.testing.assert_close(network(x), plain(x), rtol=1e-4, atol=1e-5)


# What it costs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["cnn", "small_cnn", pytest.param("resnet20", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [0.25, 0.6])
def test_macs_and_parameters_are_those_of_decomposable_net_at_the_same_ranks(kind, form, size):
    model = {"cnn": cnn, "small_cnn": lambda: models.small_cnn((8, 12, 12, 16, 16)), "resnet20": models.resnet20}[
        kind
    ]()
    x = torch.randn({"cnn": IMAGE, "small_cnn": (1, 1, 8, 8), "resnet20": (1, 3, 32, 32)}[kind])
    net = decompose(model, x, form=form)
    plan = net.resize_(macs=size)
    settings = with_overrides(SETTINGS, form=form, ranks=tuple(plan.ranks.values()))
    network = factored(model, settings, x)
    sized = METHOD.sized(network, material(x), settings)
    ours, module = sized.plan(), sized.extract()
    assert ours.macs == plan.macs == macs(module, x) == macs(net.extract(), x)
    assert ours.params == plan.params == count(module) == count(network)
    assert (ours.full_macs, ours.full_params) == (plan.full_macs, plan.full_params) == (macs(model, x), count(model))
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in net.extract().named_parameters()]
    ranks = [rank for name, rank in plan.ranks.items() if name not in plan.dense]
    assert ours.name == f"ranks {min(ranks)}-{max(ranks)}"


def test_ranks_are_taken_literally_even_where_dense_would_be_cheaper():
    settings = with_overrides(SETTINGS, ranks=(9, 29, 8, 7))
    sized = METHOD.sized(factored(cnn(), settings), material(torch.zeros(IMAGE)), settings)
    assert len(sized.extract()[3][0].weight) == 29
    assert sized.plan().macs > sized.plan().full_macs
    assert sized.plan().macs == macs(sized.extract(), torch.zeros(IMAGE))


def test_sizes_count_at_the_input_of_the_material():
    """Training may see other shapes than testing does."""
    model = models.small_cnn((8, 8, 8, 8, 8))
    settings = with_overrides(SETTINGS, ranks=(2, 4, 4, 4, 4, 3))
    network = factored(model, settings, torch.zeros(1, 1, 8, 8))
    x = torch.zeros(1, 1, 16, 16)
    plan = METHOD.sized(network, material(x), settings).plan()
    assert (plan.macs, plan.full_macs) == (macs(network.eval(), x), macs(model.eval(), x))


# The first weights


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("initialise", [nn.init.kaiming_normal_, nn.init.xavier_uniform_, lambda w: w.mul_(3)])
def test_products_have_the_variance_of_the_models_own_weights(form, initialise):
    model = nn.Sequential(nn.Conv2d(32, 48, 3), nn.Conv2d(48, 64, (3, 1)), nn.Conv2d(64, 64, 1), nn.Linear(256, 128))
    with torch.no_grad():
        for layer in model:
            initialise(layer.weight)
    layers = METHOD.network(model, None, with_overrides(SETTINGS, form=form, ranks=(24, 24, 24, 24)), is_trained=False)
    for dense, pair in zip(model, layers, strict=True):
        w = product(pair)
        assert w.shape == dense.weight.shape
        assert abs(w.mean()) < 0.05 * w.std()
        assert w.var().item() == pytest.approx(dense.weight.var().item(), rel=0.15)
        assert pair[0].weight.var().item() == pytest.approx(1 / pair[0].weight[0].numel(), rel=0.1)


@pytest.mark.parametrize("form", FORMS)
def test_where_the_model_starts_by_hes_rule_the_second_factor_does_too(form):
    model = nn.Conv2d(64, 64, 3)
    nn.init.kaiming_normal_(model.weight, nonlinearity="relu")
    _, second = METHOD.network(model, None, with_overrides(SETTINGS, form=form, ranks=(60,)), is_trained=False)
    assert second.weight.var().item() == pytest.approx(2 / second.weight[0].numel(), rel=0.1)


@pytest.mark.parametrize("form", FORMS)
def test_outputs_have_the_scale_of_the_models(form):
    """On the mean over draws: a network of few bases varies more from one draw to the next."""
    powers = {"dense": 0.0, "factored": 0.0}
    for _ in range(25):
        model = nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten())
        model.append(nn.Linear(32 * 36, 100))
        for module in (model[0], model[2], model[5]):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
        network, x = factored(model, with_overrides(SETTINGS, form=form, ranks=(16, 20, 40))), torch.randn(4, 8, 8, 8)
        with torch.no_grad():
            powers["dense"] += model(x).square().mean().item()
            powers["factored"] += network(x).square().mean().item()
    assert powers["factored"] == pytest.approx(powers["dense"], rel=0.2)


def test_weights_of_zeros_stay_zero_and_can_be_trained():
    model = nn.Linear(8, 8)
    nn.init.zeros_(model.weight)
    network = METHOD.network(model, None, with_overrides(SETTINGS, ranks=(3,)), is_trained=False)
    assert (product(network) == 0).all()
    network(torch.randn(4, 8)).sum().backward()
    assert network[1].weight.grad.abs().max() > 0


def test_the_global_seed_decides_the_weights():
    def run(seed):
        torch.manual_seed(seed)
        network = factored(cnn())
        step, optimizer = METHOD.step(network, SETTINGS), torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            step.backward(loss_of)
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in network.parameters()])

    assert torch.equal(run(3), run(3))
    assert not torch.equal(run(3), run(4))


@pytest.mark.parametrize("form", FORMS)
def test_from_trained_weights_it_starts_with_the_best_approximation(form):
    model, (x, _) = cnn().eval(), images()
    settings = replace(SETTINGS, form=form)
    state = torch.get_rng_state()
    network = factored(model, settings, is_trained=True).eval()
    assert torch.equal(torch.get_rng_state(), state)
    net = decompose(model, torch.zeros(IMAGE), form=form)
    net.resize_(ranks=dict(zip(net.plan().ranks, settings.of(ScratchSettings).ranks, strict=True)))
    torch.testing.assert_close(network(x), net(x), rtol=1e-4, atol=1e-5)


def test_it_learns():
    network = factored(cnn())
    step, optimizer = METHOD.step(network, SETTINGS), torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(step.backward(loss_of)["loss"].item())
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


# After training


def trained():
    """A network and its sizes, after an update and with statistics of its own."""
    network = factored(cnn())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    METHOD.step(network, SETTINGS).backward(loss_of)
    optimizer.step()
    return network.eval()


def test_the_only_size_is_the_network_with_tensors_of_its_own():
    network, (x, _) = trained(), images()
    sized = METHOD.sized(network, material(x), SETTINGS)
    assert len(sized.sizes) == 1
    assert torch.equal(sized.eval()(x), network(x))
    module = sized.extract()
    assert not {p.data_ptr() for p in network.parameters()} & {p.data_ptr() for p in module.parameters()}
    assert vars(module).keys() == vars(nn.Sequential()).keys()  # nothing but a plain module
    assert all(p.requires_grad for p in module.parameters())
    assert torch.equal(METHOD.sized(network, material(x), SETTINGS).eval()(x), network(x))  # and again


def test_a_file_gives_the_network_back(tmp_path):
    network, (x, _) = trained(), images()
    sized = METHOD.sized(network, material(x), SETTINGS)
    sized.save(tmp_path / "net.safetensors", info={"accuracy": 93.5})
    description, tensors = read_container(tmp_path / "net.safetensors")
    assert description["structure"] == {"form": "spatial", "ranks": [9, 7, 4, 2], "input_shape": [3, 8, 8]}
    torch.manual_seed(99)  # other initial weights
    model = cnn()
    state = torch.get_rng_state()
    other = with_overrides(SETTINGS, form="channel", ranks=())  # the file's count
    again, build = METHOD.rebuilt(model, torch.zeros(IMAGE), other, description["structure"])
    loaded = restored(tmp_path / "net.safetensors", description, tensors, again, build).eval()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(loaded(x), network(x))
    assert torch.equal(loaded.extract()(x), network(x))
    assert (loaded.plan(), loaded.info, loaded.structure) == (sized.plan(), {"accuracy": 93.5}, sized.structure)


@pytest.mark.parametrize(
    "structure",
    [
        {},
        {"form": "spatial"},
        {"form": 3, "ranks": [9, 7, 4, 2]},
        {"form": "spatial", "ranks": "9742"},
        {"form": "spatial", "ranks": [9, 7, 4, 2.5]},
        {"form": "spatial", "ranks": [9, 7, 4, True]},
        {"form": "spatial", "ranks": [9, 7, 4]},
        {"form": "spatial", "ranks": [9, 7, 4, 10**12]},
        {"form": "diagonal", "ranks": [9, 7, 4, 2]},
    ],
)
def test_a_structure_that_is_none_is_refused(structure):
    with pytest.raises(DecomposableError) as caught:
        METHOD.rebuilt(cnn(), torch.zeros(IMAGE), SETTINGS, json.loads(json.dumps(structure)))
    assert "allowed" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_other_ranks_is_refused(tmp_path):
    sized = METHOD.sized(trained(), material(torch.zeros(IMAGE)), SETTINGS)
    sized.save(tmp_path / "net.safetensors")
    description, tensors = read_container(tmp_path / "net.safetensors")
    again, build = METHOD.rebuilt(cnn(), torch.zeros(IMAGE), SETTINGS, {"form": "spatial", "ranks": [9, 7, 4, 3]})
    with pytest.raises(ArtifactError, match="not those of this model"):
        restored(tmp_path / "net.safetensors", description, tensors, again, build)


def test_a_network_of_another_method_is_refused():
    with pytest.raises(InvalidArgumentError, match="not a factored one; allowed"):
        METHOD.sized(cnn(), material(torch.zeros(IMAGE)), SETTINGS)


# Settings


def test_ranks_must_be_given():
    with pytest.raises(
        InvalidArgumentError, match=r"^ranks: none are given; allowed .*plan\.ranks.*decomposable-lab compare"
    ):
        METHOD.check(with_overrides(SETTINGS, ranks=()), has_init=False)
    METHOD.check(SETTINGS, has_init=False)
    METHOD.check(SETTINGS, has_init=True)


@pytest.mark.parametrize("ranks", [(1, 2, 3), (1, 2, 3, 4, 5)])
def test_another_number_of_ranks_is_refused_with_the_layers_and_their_full_ranks(ranks):
    with pytest.raises(InvalidArgumentError) as caught:
        factored(cnn(), with_overrides(SETTINGS, ranks=ranks))
    assert str(caught.value) == (
        f"ranks: {len(ranks)} are given; allowed: 4, one for each layer, "
        "whose full ranks are '0' 9, '3' 30, '5' 8, '8' 7"
    )


def test_a_rank_above_the_full_one_is_refused_with_the_layer():
    with pytest.raises(
        InvalidArgumentError, match=r"^ranks: layer '5' got 9; allowed: 1 to 8, and with that it is dense$"
    ):
        factored(cnn(), with_overrides(SETTINGS, ranks=(9, 7, 9, 2)))


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(InvalidArgumentError, match="no layer to decompose"):
        factored(nn.BatchNorm2d(3))


@pytest.mark.parametrize("is_trained", [True, False])
def test_weights_that_are_not_finite_are_named(is_trained):
    model = cnn()
    with torch.no_grad():
        model[5].weight[0] = math.nan
    with pytest.raises(NonFiniteError, match="layer '5'"):
        factored(model, is_trained=is_trained)


def test_a_comparison_trains_one_network_for_each_size():
    trainings = METHOD.trainings(with_overrides(Settings(), compare_ranks=(0.5, 0.25)))
    assert [(t.curve, t.folder, t.ranks, dict(t.settings)) for t in trainings] == [
        ("scratch", "0.5", 0.5, {}),
        ("scratch", "0.25", 0.25, {}),
    ]


@pytest.mark.parametrize("method", ["scratch", "trp"])
def test_methods_of_a_matrix_refuse_forms_with_several_cuts(method):
    settings, found = with_overrides(Settings(), method=method, form="tucker", ranks=(1,)), methods.find(method)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    refused = found.step if method == "trp" else found.network
    rest = () if method == "trp" else (torch.zeros(1, 3, 8, 8),)
    options = {} if method == "trp" else {"is_trained": False}
    with pytest.raises(
        InvalidArgumentError, match=f"{method}: form='tucker' is not known; allowed: 'channel', 'spatial'"
    ):
        refused(network, *rest, settings, **options)
