"""A network with a list of sizes: choosing one, what is made of it, and its file."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from decomposable.network.file.container import read_container, write_container
from decomposable_edge.errors import ArtifactError, BudgetError, InvalidArgumentError
from decomposable_lab.methods.sized import MethodSize, SizedNet, batch_statistics, restored

CHANNELS = 8
FULL_MACS, FULL_PARAMS = 9 * CHANNELS * 36 + 3 * CHANNELS, 12 * CHANNELS + 3 * CHANNELS + 3


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def whole():
    """For images of 1 × 8 × 8: a convolution of 8 channels, of which a size takes the first ones."""
    model = nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(CHANNELS, 3),
    )  # fmt: skip
    nn.init.normal_(model[1].weight)
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    return model


def size(width):
    """MACs and parameters of the first so many channels."""
    k = round(CHANNELS * width)
    return MethodSize(
        name=f"width {width:g}",
        value=width,
        macs=9 * k * 36 + 3 * k,
        params=12 * k + 3 * k + 3,
        full_macs=FULL_MACS,
        full_params=FULL_PARAMS,
    )


WIDTHS = (0.25, 1.0, 0.5)
SIZES = [size(width) for width in WIDTHS]


def builder(network):
    @torch.no_grad()
    def build(wanted):
        k = round(CHANNELS * wanted.value)
        conv, norm, linear = nn.Conv2d(1, k, 3), nn.BatchNorm2d(k), nn.Linear(k, 3)
        module = nn.Sequential(conv, norm, nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)
        module.to(network[0].weight.dtype)
        for mine, its in zip(module.state_dict().values(), network.state_dict().values(), strict=True):
            mine.copy_(its[:, :k] if its.shape == (3, CHANNELS) else its[:k] if its.dim() and len(its) != 3 else its)
        return module

    return build


def statistics():
    return {w: {"1": (torch.randn(round(8 * w)), torch.rand(round(8 * w)) + 0.5)} for w in (0.25, 0.5)}


def sized(network=None, **options):
    network = whole() if network is None else network
    options = {"method": "toy", "statistics": statistics(), **options}
    return SizedNet(network=network, sizes=SIZES, build=builder(network), **options)


def images(count=4):
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


# Sizes


def test_it_starts_with_the_largest_and_lists_them_largest_first():
    net = sized()
    assert [s.value for s in net.sizes] == [1.0, 0.5, 0.25]
    assert net.plan() == size(1.0)
    assert (net.plan().macs_fraction, net.plan().params_fraction) == (1.0, 1.0)


def test_a_size_states_its_parts_of_the_original():
    half = size(0.5)
    assert half.macs_fraction == half.macs / FULL_MACS == 0.5
    assert half.params_fraction == half.params / FULL_PARAMS
    assert str(half) == f"width 0.5: 63 parameters ({63 / 123:.3f}x), 1,308 MACs (0.500x)"


@pytest.mark.parametrize(
    ("budget", "width"),
    [
        (1.0, 1.0),
        (1, 1.0),
        (0.999, 0.5),
        (0.5, 0.5),
        (0.49, 0.25),
        (FULL_MACS, 1.0),
        (FULL_MACS - 1, 0.5),
        (10**9, 1.0),
    ],
)
def test_the_largest_size_within_a_budget_of_macs(budget, width):
    net = sized()
    assert net.plan(macs=budget) == size(width)
    assert net.plan() == size(1.0)  # nothing was taken yet
    assert net.resize_(macs=budget) == size(width) == net.plan()
    assert net.module[0].out_channels == round(8 * width)


@pytest.mark.parametrize(("budget", "width"), [(1.0, 1.0), (122, 0.5), (63, 0.5), (62, 0.25), (0.3, 0.25)])
def test_the_largest_size_within_a_budget_of_parameters(budget, width):
    assert sized().resize_(params=budget) == size(width)


def test_the_part_that_a_size_states_gives_that_size():
    net = sized()
    for one in net.sizes:
        assert net.plan(macs=one.macs_fraction) == net.plan(macs=one.macs) == one
        assert net.plan(params=one.params_fraction) == net.plan(params=one.params) == one


@pytest.mark.parametrize(("measure", "budget"), [("macs", 0.1), ("macs", 100), ("params", 0.2), ("params", 7)])
def test_a_budget_below_the_smallest_size_names_what_is_possible(measure, budget):
    net = sized()
    least = getattr(size(0.25), measure)
    with pytest.raises(
        BudgetError, match=rf"^{measure}={budget:g}; allowed: at least {least:,} \(.*\), its width 0.25$"
    ):
        net.resize_(**{measure: budget})
    assert net.plan() == size(1.0)


@pytest.mark.parametrize("budget", [0, -1, 0.0, math.nan, math.inf, 1.5, True, "0.5", None])
def test_other_budgets_are_refused_in_one_line(budget):
    with pytest.raises(InvalidArgumentError) as caught:
        sized().resize_(macs=budget)
    assert "\n" not in str(caught.value)


def test_exactly_one_measure_is_given():
    for budgets in ({}, {"macs": 0.5, "params": 0.5}):
        with pytest.raises(InvalidArgumentError, match="give one of macs= and params="):
            sized().resize_(**budgets)


def test_a_size_of_another_network_is_refused():
    net = sized()
    for foreign in (size(0.75), replace(size(0.5), macs=7)):
        with pytest.raises(InvalidArgumentError, match=r"not one of this network's sizes; allowed: width 1, width 0.5"):
            net.resize_(foreign)
    assert net.plan() == size(1.0)
    assert net.resize_(size(0.5)) == net.plan() == size(0.5)


# What runs


def test_each_size_runs_with_its_own_statistics_and_those_without_with_the_networks():
    network, own = whole(), statistics()
    net = sized(network, statistics=own).eval()
    for width in WIDTHS:
        net.resize_(size(width))
        reference = builder(network)(size(width)).eval()
        if width in own:
            reference[1].running_mean.copy_(own[width]["1"][0])
            reference[1].running_var.copy_(own[width]["1"][1])
        assert torch.equal(net(images()), reference(images()))


def test_a_pass_in_training_mode_leaves_the_statistics_of_the_size_alone():
    net = sized()
    net.resize_(size(0.5))
    before = net.module[1].running_mean.clone()
    net.train()(images())
    assert not torch.equal(net.module[1].running_mean, before)
    net.resize_(size(0.5))
    assert torch.equal(net.module[1].running_mean, before)


@pytest.mark.parametrize("is_training", [True, False])
def test_a_resize_keeps_the_mode(is_training):
    net = sized().train(is_training)
    net.resize_(macs=0.5)
    assert all(module.training == is_training for module in net.modules())
    assert all(module.training == is_training for module in net.extract().modules())


def test_what_is_extracted_has_no_tie_to_the_network():
    net = sized().eval()
    net.resize_(macs=0.5)
    before = net(images())
    module = net.extract()
    assert torch.equal(module(images()), before)
    with torch.no_grad():
        for tensor in (*module.parameters(), module[1].running_mean):
            tensor.add_(1)
    assert torch.equal(net(images()), before)
    net.resize_(macs=1.0)
    net.resize_(macs=0.5)
    assert torch.equal(net(images()), before)


def test_a_size_made_in_inference_mode_can_be_trained():
    net = sized()
    with torch.inference_mode():
        net.resize_(macs=0.5)
    module = net.extract()
    module(images()).sum().backward()
    assert module[0].weight.grad is not None


def test_its_state_is_that_of_the_current_size_and_cannot_be_loaded():
    net = sized()
    net.resize_(macs=0.25)
    assert net.state_dict()["module.0.weight"].shape == (2, 1, 3, 3)
    with pytest.raises(InvalidArgumentError, match=r"share their weights; allowed: .*extract\(\)"):
        net.load_state_dict(net.state_dict())


def test_all_sizes_are_cast_with_the_current_one():
    net = sized().eval()
    net.resize_(macs=0.5)
    before = net(images())
    assert net.to(torch.float64) is net
    assert net.plan() == size(0.5)
    assert not net.training
    torch.testing.assert_close(net(images().double()), before.double(), rtol=1e-5, atol=1e-6)
    for width in WIDTHS:
        net.resize_(size(width))
        floats = [t for t in net.state_dict().values() if t.is_floating_point()]
        assert all(t.dtype == torch.float64 for t in floats)


def test_it_shows_its_method_and_size():
    net = sized()
    net.resize_(macs=0.5)
    assert net.extra_repr().startswith("toy; width 0.5: 63 parameters")
    assert net.extra_repr().endswith("3 sizes")


# Files


def saved(tmp_path, **options):
    net = sized(structure={"widths": list(WIDTHS)}, **options).eval()
    net.save(tmp_path / "net.safetensors")
    return net, tmp_path / "net.safetensors"


def load(path):
    description, tensors = read_container(path)
    torch.manual_seed(5)  # other weights
    network = whole()
    return restored(path, description, tensors, network, builder(network))


def test_a_file_holds_all_sizes(tmp_path):
    net, path = saved(tmp_path, info={"accuracy": [93.5, None]})
    again = load(path).eval()
    assert (again.sizes, again.method, again.plan()) == (net.sizes, "toy", size(1.0))
    assert (again.structure, again.info) == ({"widths": list(WIDTHS)}, {"accuracy": [93.5, None]})
    for width in WIDTHS:
        net.resize_(size(width))
        again.resize_(size(width))
        assert torch.equal(again(images()), net(images()))


def test_what_is_loaded_can_be_saved_again_to_the_same_bytes(tmp_path):
    _, path = saved(tmp_path, info={"note": "x"})
    load(path).save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_info_may_be_given_anew(tmp_path):
    net, path = saved(tmp_path)
    net.save(path, info={"new": 1})
    assert load(path).info == {"new": 1}
    with pytest.raises(InvalidArgumentError, match="info"):
        net.save(path, info={"tensor": torch.zeros(1)})
    assert load(path).info == {"new": 1}  # at once or not at all


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_refused(tmp_path, part):
    _, path = saved(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(ArtifactError):
        load(path)


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    _, path = saved(tmp_path)
    content = path.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 60)):
        damaged = bytearray(content)
        damaged[place] ^= 4
        path.write_bytes(bytes(damaged))
        with pytest.raises(ArtifactError):
            load(path)


def lie(path, change):
    """Write the file anew, with a right checksum, after a change of its description and tensors."""
    description, tensors = read_container(path)
    description = {k: v for k, v in description.items() if k not in ("sha256", "format", "strides")}
    change(description, tensors)
    write_container(path, json.loads(json.dumps(description)), tensors)


def put(key, value):
    return lambda description, tensors: description.update({key: value})


def without(key):
    return lambda description, tensors: description.pop(key)


def with_tensor(key, value):
    return lambda description, tensors: tensors.update({key: value})


def without_tensor(key):
    return lambda description, tensors: tensors.pop(key)


def entry(**changes):
    return [{**asdict(size(1.0)), **changes}]


LIES = {
    "no sizes": without("sizes"),
    "sizes that are none": put("sizes", 3),
    "sizes that are text": put("sizes", ["width 0.5"]),
    "a size with an unknown field": put("sizes", entry(rank=3)),
    "a size without MACs": put("sizes", [{"name": "width 1", "value": 1.0}]),
    "no method": without("method"),
    "no structure": without("structure"),
    "no info": without("info"),
    "a structure that is none": put("structure", 5),
    "a weight that is missing": without_tensor("state/0.weight"),
    "a weight too many": with_tensor("state/9.weight", torch.zeros(3)),
    "a weight of another shape": with_tensor("state/0.weight", torch.zeros(8, 1, 5, 5)),
    "statistics of a layer that there is not": lambda d, t: t.update(
        {f"statistics/0/features.1/{kind}": torch.zeros(8) for kind in ("mean", "var")}
    ),
    "a mean without a variance": without_tensor("statistics/1/1/var"),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_file_that_says_what_is_not_so_is_refused(tmp_path, kind):
    _, path = saved(tmp_path)
    lie(path, LIES[kind])
    with pytest.raises(ArtifactError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


# Statistics of batch normalisation


def two_norms():
    return nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(180, 6),
        nn.BatchNorm1d(6, momentum=0.3),
    ).double()  # fmt: skip


def test_statistics_are_the_mean_over_batches_of_each_batchs_own():
    network = two_norms()
    nn.init.normal_(network[1].weight)
    batches = [images(count).double() * scale for count, scale in ((4, 1.0), (6, 2.0), (3, 0.5))]
    result = batch_statistics(network, [(x, torch.zeros(len(x))) for x in batches])
    means, variances = {"1": [], "6": []}, {"1": [], "6": []}
    with torch.no_grad():
        for x in batches:
            y = network[0](x)
            means["1"].append(y.mean(dim=(0, 2, 3)))
            variances["1"].append(y.transpose(0, 1).flatten(1).var(dim=1, unbiased=True))
            shape = (1, -1, 1, 1)
            centred = y - y.mean(dim=(0, 2, 3), keepdim=True)
            y = centred / (y.var(dim=(0, 2, 3), unbiased=False, keepdim=True) + 1e-5).sqrt()
            y = y * network[1].weight.view(shape) + network[1].bias.view(shape)
            y = network[5](y.relu().flatten(1))  # dropout off
            means["6"].append(y.mean(dim=0))
            variances["6"].append(y.var(dim=0, unbiased=True))
    assert list(result) == ["1", "6"]
    for name, (mean, variance) in result.items():
        torch.testing.assert_close(mean, torch.stack(means[name]).mean(dim=0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(variance, torch.stack(variances[name]).mean(dim=0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fails", [False, True])
def test_measuring_leaves_the_network_as_it_was(fails):
    network = two_norms().train()
    network[3].eval()
    before = {name: (id(t), t.clone()) for name, t in network.state_dict(keep_vars=True).items()}
    flags = [module.training for module in network.modules()]
    state = torch.get_rng_state()
    batches = [images().double(), torch.zeros(2, 7).double()] if fails else [images().double()]
    if fails:
        with pytest.raises(RuntimeError):
            batch_statistics(network, batches)
    else:
        batch_statistics(network, batches)
    now = network.state_dict(keep_vars=True)
    assert all(id(now[name]) == place and torch.equal(now[name], t) for name, (place, t) in before.items())
    assert [module.training for module in network.modules()] == flags
    assert (network[1].momentum, network[6].momentum) == (0.1, 0.3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in network.parameters())


def test_measured_statistics_do_not_change_with_the_network():
    network = two_norms()
    result = batch_statistics(network, [images().double()])
    before = {name: (mean.clone(), variance.clone()) for name, (mean, variance) in result.items()}
    network.train()(images().double() * 3)
    assert all(torch.equal(a, b) for name in result for a, b in zip(result[name], before[name], strict=True))


def test_a_network_without_batch_normalisation_has_no_statistics():
    assert batch_statistics(nn.Linear(2, 2), [torch.zeros(3, 2)]) == {}
