import copy
import functools
import math
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import decomposable.network.calibration.batches as batches_module
from decomposable import decompose, models
from decomposable_edge.errors import BudgetError, DecomposableError, InvalidArgumentError
from decomposable_edge.sizing.plans import SizeRequest
from refusals import Saying, refused

few = settings(max_examples=10, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def cnn():
    """Two batch normalisation layers for images and one for vectors; images are 3 × 8 × 8."""
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1, bias=False),
        nn.BatchNorm2d(10),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(10, 12, 3, stride=2, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(192, 16),
        nn.BatchNorm1d(16),
        nn.Linear(16, 5),
    )


NORMS = (1, 5, 9)


def make(model=None):
    """A model with statistics of its own, decomposed, and batches of unequal size to calibrate with."""
    model = model or cnn()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    batches = list((torch.randn(40, 3, 8, 8) * 2 + 0.5).split(16))
    return decompose(model.eval(), batches[0]), batches


def statistics(module):
    """All running means and variances."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return [t.clone() for norm in norms for t in (norm.running_mean, norm.running_var)]


def assert_statistics(module, expected, **tolerance):
    for a, b in zip(statistics(module), expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def same_statistics(module, expected):
    return all(torch.equal(a, b) for a, b in zip(statistics(module), expected, strict=True))


@torch.no_grad()
def cumulative_average(plain, batches):
    """PyTorch's own way for one plain network."""
    plain.eval()
    for module in plain.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
            module.momentum = None
            module.train()
    for batch in batches:
        plain(batch)
    return statistics(plain)


@torch.no_grad()
def layer_by_layer(plain, batches):
    """Mean and biased variance of all the data, layer after layer of a sequence."""
    x = torch.cat(list(batches))
    for layer in plain.eval():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            axes = [axis for axis in range(x.dim()) if axis != 1]
            layer.running_mean, layer.running_var = x.mean(axes), x.var(axes, correction=0)
        x = layer(x)
    return statistics(plain)


def extracted(net, **size):
    """A plain network of some size, made without the warning for networks that are not calibrated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.resize_(**size)
        return net.extract()


# What is computed


@few
@given(size=st.floats(0.2, 0.99), form=st.sampled_from(["spatial", "channel"]))
def test_statistics_are_torchs_own_cumulative_average_with_dropout_off(size, form):
    torch.manual_seed(0)
    model, batches = cnn().eval(), [torch.randn(16, 3, 8, 8) + 1 for _ in range(3)]
    net = decompose(model, batches[0], form=form)
    expected = cumulative_average(extracted(net, macs=size), batches)
    net.calibrate_(batches, sizes=[size])
    net.resize_(macs=size)
    assert_statistics(net, expected)


def test_exact_statistics_are_those_of_the_data_layer_by_layer():
    net, batches = make()
    expected = layer_by_layer(extracted(net, macs=0.5), batches)
    net.calibrate_(batches, sizes=[0.5], exact=True)
    net.resize_(macs=0.5)
    assert_statistics(net, expected, rtol=1e-4, atol=1e-5)


def test_exact_statistics_do_not_depend_on_how_the_data_is_split():
    net, batches = make()
    net.calibrate_(batches, sizes=[0.5], exact=True)
    net.resize_(macs=0.5)
    expected = statistics(net)
    net.calibrate_(torch.cat(batches).split(7), sizes=[0.5], exact=True)
    assert_statistics(net, expected, rtol=1e-4, atol=1e-5)


def test_exact_statistics_of_several_sizes():
    net, batches = make()
    expected = {size: layer_by_layer(extracted(net, macs=size), batches) for size in (0.3, 0.7)}
    net.calibrate_(batches, sizes=[0.3, 0.7], exact=True)
    for size in expected:
        net.resize_(macs=size)
        assert_statistics(net, expected[size], rtol=1e-4, atol=1e-5)


def test_exact_statistics_where_the_order_of_use_is_not_that_of_definition():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last_norm, self.last = nn.BatchNorm1d(6), nn.Linear(8, 6)
            self.first_norm, self.first = nn.BatchNorm1d(8), nn.Linear(6, 8)

        def forward(self, x):
            return self.last_norm(self.last(self.first_norm(self.first(x)).relu()))

    model, x = Backwards().eval(), torch.randn(50, 6)
    net = decompose(model, x)
    plain = extracted(net, ratio=0.4)
    macs = net.plan().macs
    in_order = nn.Sequential(plain.first, plain.first_norm, nn.ReLU(), plain.last, plain.last_norm)
    expected = layer_by_layer(in_order, [x])
    net.calibrate_([x], sizes=[macs], exact=True)
    net.resize_(macs=macs)
    current = net.module
    assert_statistics(nn.Sequential(current.first_norm, current.last_norm), expected, rtol=1e-4, atol=1e-5)


def test_all_sizes_are_measured_on_the_same_batches_of_one_pass():
    net, batches = make()
    passes = []

    class Counting:
        def __iter__(self):
            passes.append(1)
            return iter(batches)

    report = net.calibrate_(Counting(), sizes=[0.3, 0.5, 0.8])
    assert (len(passes), report.batches, report.sizes) == (1, 3, 3)


def test_a_forward_of_ones_own():
    net, batches = make()
    expected = cumulative_average(extracted(net, macs=0.5), [2 * b for b in batches])
    net.calibrate_(batches, sizes=[0.5], forward=lambda network, batch: network(2 * batch))
    net.resize_(macs=0.5)
    assert_statistics(net, expected)


def test_the_forward_of_decompose_is_the_default():
    _, batches = make()
    net = decompose(cnn().eval(), batches[0], forward=lambda network, batch: network(2 * batch))
    expected = cumulative_average(extracted(net, macs=0.5), [2 * b for b in batches])
    net.calibrate_(batches, sizes=[0.5])
    net.resize_(macs=0.5)
    assert_statistics(net, expected)


# Loaders


def loaders(batches):
    labels = [torch.zeros(len(b)) for b in batches]
    return {
        "tuples": list(zip(batches, labels, strict=True)),
        "lists": [[b, y] for b, y in zip(batches, labels, strict=True)],
        "dicts": [{"image": b, "label": y} for b, y in zip(batches, labels, strict=True)],
        "generator": (b for b in batches),
        "iterator of tuples": iter(list(zip(batches, labels, strict=True))),
        "DataLoader": DataLoader(TensorDataset(torch.cat(batches), torch.cat(labels)), batch_size=16),
    }


@pytest.mark.parametrize("kind", ["tuples", "lists", "dicts", "generator", "iterator of tuples", "DataLoader"])
def test_every_kind_of_loader(kind):
    net, batches = make()
    expected = cumulative_average(extracted(net, macs=0.5), batches)
    net.calibrate_(loaders(batches)[kind], sizes=[0.5])
    assert_statistics(net, expected)


@pytest.mark.parametrize("exact", [True, False])
def test_an_empty_loader_is_refused_and_nothing_changes(exact):
    net, batches = make()
    net.calibrate_(batches, sizes=[0.5])
    net.resize_(macs=0.5)
    before = statistics(net)
    with refused("loader", 0, "at least one batch"):
        net.calibrate_([], sizes=[0.5], exact=exact)
    net.resize_(macs=0.5)
    assert same_statistics(net, before)


def test_exact_keeps_what_can_be_run_through_only_once_up_to_a_stated_memory(monkeypatch):
    net, batches = make()
    net.calibrate_(batches, sizes=[0.5], exact=True)
    net.resize_(macs=0.5)
    expected = statistics(net)
    net.calibrate_((b for b in batches), sizes=[0.5], exact=True)
    assert same_statistics(net, expected)
    monkeypatch.setattr(batches_module, "MOST_KEPT", batches[0].nbytes)
    net.calibrate_(batches, sizes=[0.5], exact=True)  # a list begins anew
    assert same_statistics(net, expected)
    with refused("loader", allowed=Saying("^fewer images, or one that begins anew")):
        net.calibrate_((b for b in batches), sizes=[0.5], exact=True)


def test_exact_is_for_chosen_sizes():
    net, batches = make()
    with refused("exact", True, Saying(r"^with sizes=\[...\]")):
        net.calibrate_(batches, exact=True)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, torch.zeros(len(x))), lambda x: {"image": x}])
def test_nan_images_are_refused_naming_the_batch(exact, wrap):
    net, batches = make()
    net.calibrate_(batches, sizes=[0.5])
    net.resize_(macs=0.5)
    before = statistics(net)
    batches[1] = batches[1].clone()
    batches[1][3, 0, 0, 0] = math.nan
    with refused("loader", 2, "numbers only"):
        net.calibrate_(map(wrap, batches), sizes=[0.5], exact=exact)
    assert same_statistics(net, before)


def test_nan_in_labels_is_nobodys_concern():
    net, batches = make()
    assert net.calibrate_([(x, torch.full((len(x),), math.nan)) for x in batches], sizes=[0.5]).batches == 3


@pytest.mark.parametrize("exact", [True, False])
def test_infinite_images_are_refused_naming_the_batch(exact):
    net, batches = make()
    batches[2] = torch.full_like(batches[2], math.inf)
    with refused("loader", 3, "finite inputs"):
        net.calibrate_(batches, sizes=[0.5], exact=exact)


def test_after_calibrating_a_size_far_away_is_warned_of_again():
    net, batches = make()
    with pytest.warns(UserWarning, match="still has the full network's"):
        net.resize_(macs=0.5)
    net.calibrate_(batches, sizes=[0.9, 0.6])
    with pytest.warns(UserWarning, match="too far from this size"):
        net.resize_(macs=0.2)


# What stays as it is


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_training_flags_and_momentum_are_as_before(is_training, exact):
    net, batches = make()
    net.train(is_training)
    net.calibrate_(batches, sizes=[0.5], exact=exact)
    assert all(module.training == is_training for module in net.modules())
    assert [net.module[i].momentum for i in NORMS] == [0.1] * 3
    assert all(module.training == is_training for module in net.extract().modules())


@pytest.mark.parametrize("exact", [True, False])
def test_the_current_size_and_the_model_stay(exact):
    model = cnn()
    net, batches = make(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    plan, live = net.plan(), [b.clone() for b in net.buffers()]
    net.calibrate_(batches, sizes=[0.5], exact=exact)
    assert net.plan() == plan
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), live, strict=True))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_forward_pass_that_fails_leaves_the_network_as_it_was():
    net, batches = make()
    net.train()
    module, live = net.module, statistics(net)
    with pytest.raises(RuntimeError):
        net.calibrate_([*batches, torch.randn(2, 4, 8, 8)], sizes=[0.5])
    assert net.module is module
    assert same_statistics(net, live)
    assert all(m.training for m in net.modules())


def test_calibration_draws_no_random_numbers():
    net, batches = make()
    state = torch.get_rng_state()
    net.calibrate_(batches, sizes=[0.5])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_weights_of_no_size_change():
    net, batches = make()
    full = net.extract()
    net.calibrate_(batches)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), full.parameters(), strict=True))


def test_a_pass_in_training_mode_does_not_spoil_what_is_stored():
    net, batches = make()
    net.calibrate_(batches, sizes=[0.5])
    net.resize_(macs=0.5)
    before = statistics(net)
    net.train()(batches[0])
    assert not same_statistics(net, before)
    net.resize_(macs=1.0)
    net.resize_(macs=0.5)
    assert same_statistics(net, before)


# The full size


def test_full_size_keeps_the_original_statistics_by_default():
    model = cnn()
    net, batches = make(model)
    net.calibrate_(batches)
    assert same_statistics(net, statistics(model))
    net.resize_(macs=0.5)
    assert not same_statistics(net, statistics(model))
    net.resize_(macs=1.0)
    assert same_statistics(net, statistics(model))
    torch.testing.assert_close(net(batches[0]), model(batches[0]), atol=1e-4, rtol=0)


def test_full_size_uses_its_own_statistics_where_it_was_calibrated_explicitly():
    model = cnn()
    net, batches = make(model)
    expected = cumulative_average(copy.deepcopy(model), batches)
    net.calibrate_(batches, sizes=[1.0])
    assert_statistics(net, expected)
    net.calibrate_(batches, sizes=[0.5])
    net.resize_(macs=0.5)
    net.resize_(macs=1.0)
    assert_statistics(net, expected)


def test_a_size_close_to_the_full_one_has_statistics_close_to_the_original_ones():
    """A few small sizes were calibrated: one near the full size lies between the largest of them and the original."""
    model = cnn()
    net, batches = make(model)
    original = statistics(model)
    net.calibrate_(batches, sizes=[0.3])
    net.resize_(macs=0.3)
    small = statistics(net)
    net.resize_(ranks={**net.plan().full_ranks, "10": 4})  # all but a basis of the last layer, which feeds no norm
    for value, low, high in zip(statistics(net), small, original, strict=True):
        assert (value - high).norm() < 0.5 * (low - high).norm()


# Stored sizes


@pytest.mark.parametrize("exact", [True, False])
def test_a_calibrated_size_is_what_calibrating_it_alone_gives(exact):
    model = cnn()
    net, batches = make(model)
    sizes = [0.8, 0.3, 0.5]
    net.calibrate_(batches, sizes=sizes, exact=exact)
    for size in sizes:
        alone = decompose(model, batches[0])
        alone.calibrate_(batches, sizes=[size], exact=exact)
        assert alone.resize_(macs=size) == net.resize_(macs=size)
        assert_statistics(net, statistics(alone), rtol=0, atol=0)
        assert torch.equal(net(batches[0]), alone(batches[0]))


def test_sizes_are_added_to_those_stored():
    net, batches = make()
    net.calibrate_(batches, sizes=[0.3])
    net.resize_(macs=0.3)
    before = statistics(net)
    report = net.calibrate_(batches, sizes=[0.7, 0.5])
    assert same_statistics(net, before)
    assert (report.sizes, report.bytes) == (2, 3 * 2 * 4 * (10 + 12 + 16))


def test_of_a_size_calibrated_twice_the_newer_one_counts():
    net, batches = make()
    net.calibrate_(batches, sizes=[0.5])
    net.resize_(macs=0.5)
    newer = [b + 1 for b in batches]
    expected = cumulative_average(net.extract(), newer)
    net.calibrate_(newer, sizes=[0.5])
    assert_statistics(net, expected)


def test_calibrating_the_current_size_takes_effect_at_once():
    net, batches = make()
    expected = cumulative_average(extracted(net, macs=0.5), batches)
    net.calibrate_(batches, sizes=[0.5])
    assert_statistics(net, expected)


def test_sizes_may_be_counts():
    net, batches = make()
    count = net.plan().full_macs // 2
    net.calibrate_(batches, sizes=[count])
    net.resize_(macs=count)
    assert_statistics(net, cumulative_average(net.extract(), batches))


def test_sizes_that_are_one_plan_are_calibrated_once():
    net, batches = make()
    assert net.calibrate_(batches, sizes=[0.5, 0.5, 0.5 + 1e-9]).sizes == 1


def test_without_an_example_sizes_are_parts_of_the_parameters():
    _, batches = make()
    net = decompose(cnn().eval())
    net.calibrate_(batches, sizes=[0.5])
    net.resize_(params=0.5)
    assert_statistics(net, cumulative_average(net.extract(), batches))
    net.calibrate_(batches)
    net.resize_(params=0.6)
    assert net(batches[0]).shape == (16, 5)


@pytest.mark.parametrize("sizes", [[], [0.0], [2.5], ["half"], [1e-9], 0.5])
def test_wrong_sizes_are_refused(sizes):
    net, batches = make()
    with pytest.raises(DecomposableError):
        net.calibrate_(batches, sizes=sizes)


# Between the calibrated sizes


def take(net, size):
    """A size however far it is from calibrated ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return net.resize_(net.selector.of_size(size, "macs"))


@few
@given(size=st.floats(0.3, 0.9))
def test_between_two_sizes_values_lie_between_those_of_the_neighbours(size):
    torch.manual_seed(0)
    net, batches = make()
    net.calibrate_(batches, sizes=[0.3, 0.9])
    ends = []
    for end in (0.3, 0.9):
        net.resize_(macs=end)
        ends.append(statistics(net))
    take(net, size)
    for value, a, b in zip(statistics(net), *ends, strict=True):
        assert (torch.minimum(a, b) - 1e-6 <= value).all()
        assert (value <= torch.maximum(a, b) + 1e-6).all()


@pytest.mark.parametrize("size", [0.35, 0.5, 0.65, 0.85])
def test_a_layers_place_between_two_sizes_is_that_of_the_rank_which_feeds_it(size):
    net, batches = make()
    net.calibrate_(batches, sizes=[0.3, 0.9])
    low, low_statistics = net.resize_(macs=0.3), statistics(net)
    high, high_statistics = net.resize_(macs=0.9), statistics(net)
    plan = take(net, size)
    for index, feeder in enumerate(["0", "4", "8"]):
        steps = high.ranks[feeder] - low.ranks[feeder]
        if steps:
            place = (plan.ranks[feeder] - low.ranks[feeder]) / steps
        else:
            place = (plan.macs - low.macs) / (high.macs - low.macs)
        for row in (2 * index, 2 * index + 1):
            expected = torch.lerp(low_statistics[row], high_statistics[row], place)
            torch.testing.assert_close(statistics(net)[row], expected)


def test_a_norm_that_no_decomposed_layer_feeds_goes_by_the_size_of_the_network():
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.BatchNorm1d(12), nn.Linear(12, 9))
    x = torch.randn(50, 12)
    net = decompose(model.eval(), x)
    net.calibrate_([x], sizes=[0.3, 0.9])
    low, low_statistics = net.resize_(macs=0.3), statistics(net)
    high, high_statistics = net.resize_(macs=0.9), statistics(net)
    plan = take(net, 0.6)
    place = (plan.macs - low.macs) / (high.macs - low.macs)
    for value, a, b in zip(statistics(net), low_statistics, high_statistics, strict=True):
        torch.testing.assert_close(value, torch.lerp(a, b, place))


@few
@given(size=st.tuples(st.sampled_from(["macs", "params", "ratio"]), st.floats(0.01, 1)))
def test_any_size_can_be_had_after_the_default_calibration(size):
    net, batches = calibrated()
    try:
        net.resize_(**dict([size]))
    except BudgetError:
        net.resize_(ratio=0.01)
    assert all(torch.isfinite(s).all() for s in statistics(net))
    assert all((variance >= 0).all() for variance in statistics(net)[1::2])
    assert torch.isfinite(net(batches[0])).all()


@functools.cache
def calibrated():
    net, batches = make()
    net.calibrate_(batches)
    return net, batches


def test_the_default_calibration_has_the_smallest_size_too():
    net, batches = make()
    net.calibrate_(batches)
    smallest = net.resize_(ranks=dict.fromkeys(net.plan().ranks, 1))
    assert smallest.ratio < 0.1
    assert_statistics(net, cumulative_average(net.extract(), batches))


@pytest.mark.parametrize("kind", ["min_rank", "model"])
def test_a_network_that_has_one_size_only_can_be_calibrated(kind):
    if kind == "min_rank":
        net, x = decompose(cnn().eval(), torch.zeros(1, 3, 8, 8), min_rank=1000), torch.randn(8, 3, 8, 8)
    else:
        x = torch.randn(8, 1, 4, 4)
        net = decompose(nn.Sequential(nn.Conv2d(1, 6, 1), nn.BatchNorm2d(6)).eval(), x)
    assert net.calibrate_([x]).sizes == 1


def test_limits_below_full_rank_can_be_calibrated():
    _, batches = make()
    net = decompose(cnn().eval(), batches[0], limits={"4": (1, 6)})
    net.calibrate_(batches, sizes=[1.0])
    plan = net.resize_(macs=1.0)
    assert plan.ranks["4"] == 6
    assert_statistics(net, cumulative_average(net.extract(), batches))


# Warnings and networks without batch normalisation


def test_a_resize_before_calibration_warns_once():
    net, _ = make()
    with pytest.warns(UserWarning, match="calibrate_"):
        net.resize_(macs=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.resize_(macs=0.4)


def test_rounded_ranks_have_statistics_of_their_own():
    """Equal to torch's own for a plan that was calibrated; between two, those of neighbours that are rounded too."""
    net, batches = make()
    net.calibrate_(batches)
    net.calibrate_(batches, sizes=[0.5, 0.6, 0.7], align=4)
    assert net._statistics.alignments == (1, 4)
    for macs in (0.5, 0.6, 0.7):
        plan = net.resize_(macs=macs, align=4)
        assert plan.align == 4
        found = net._statistics.between(plan)
        assert found.lower == found.upper
        assert_statistics(net.module, cumulative_average(net.extract(), batches))


def test_neighbours_are_the_nearest_by_their_ranks():
    net, batches = make()
    net.calibrate_(batches, sizes=[0.3, 0.45, 0.55, 0.65, 0.8])
    rounded = [
        net.selector.plan_for(SizeRequest(macs=macs, align=2)) for macs in (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7)
    ]
    rounded = list({plan.ranks: plan for plan in rounded}.values())
    assert len(rounded) >= 3
    first, between, last = rounded[0], rounded[1], rounded[2]
    net.calibrate_(batches, sizes=[first.macs, last.macs], align=2)
    found = net._statistics.between(between)
    plans = (*net._statistics.plans, net._statistics.full_plan)

    def distance(plan):
        return sum(abs(rank - between.ranks[name]) / plan.full_ranks[name] for name, rank in plan.ranks.items())

    smaller = [plan for plan in plans if plan.macs < between.macs]
    larger = [plan for plan in plans if plan.macs >= between.macs]
    assert distance(plans[found.lower]) == min(map(distance, smaller))
    assert distance(plans[found.upper]) == min(map(distance, larger))


def test_ranks_rounded_as_nothing_that_was_calibrated_warn_once():
    net, batches = make()
    net.calibrate_(batches, sizes=[0.3, 0.6])
    with pytest.warns(UserWarning, match=r"not rounded to multiples of 4.*run calibrate_\(loader, align=4\) once"):
        net.resize_(macs=0.6, align=4)
    net.resize_(macs=0.7, align=4)
    net, batches = make()
    net.calibrate_(batches, sizes=[0.6], align=4)
    net.resize_(macs=0.6, align=4)


def wide():
    """A network whose ranks "auto" rounds, and data."""
    torch.manual_seed(0)
    layers = [nn.Linear(300, 400), nn.BatchNorm1d(400), nn.Linear(400, 300), nn.BatchNorm1d(300), nn.Linear(300, 8)]
    batches = [torch.randn(64, 300)]
    return decompose(nn.Sequential(*layers).eval(), batches[0]), batches


def assert_near_its_own_statistics(net, batches):
    stored, own = statistics(net.module), cumulative_average(net.extract(), batches)
    for i in (0, 2):
        (mean, var), (own_mean, own_var) = stored[i : i + 2], own[i : i + 2]
        assert ((mean - own_mean).abs() / own_var.sqrt()).mean() < 0.05
        assert ((var - own_var).abs() / own_var).mean() < 0.05


def error_of_variances(net, batches, align):
    """How far stored variances are from those of the data, relative to them: the mean over channels and sizes."""
    found = []
    for macs in (0.2, 0.33, 0.47, 0.6, 0.75):
        assert net.resize_(macs=macs, align=align).warning is None
        pairs = zip(statistics(net.module)[1::2], cumulative_average(net.extract(), batches)[1::2], strict=True)
        found += [float(((var - own).abs() / own).mean()) for var, own in pairs]
    return np.mean(found)


@pytest.mark.parametrize("align", [1, "auto"])
def test_auto_takes_the_statistics_of_unrounded_sizes_as_well(align):
    """They are close to its own; nothing warns."""
    net, batches = wide()
    net.calibrate_(batches, sizes=[0.46 + 0.005 * step for step in range(9)], align=align)
    plan = net.resize_(macs=0.5)
    assert plan.warning is plan.instead_of is None
    assert net.plan(macs=0.5, align="auto").ranks != net.plan(macs=0.5, align=1).ranks
    assert net._statistics.alignments == (1,)
    assert_near_its_own_statistics(net, batches)
    net.forget_statistics_()
    net.calibrate_(batches, sizes=[0.7], align=8)
    with pytest.warns(UserWarning, match=r"statistics of rounded ranks only.*run calibrate_\(loader\) once"):
        net.resize_(macs=0.5)


def test_a_size_is_calibrated_with_the_ranks_that_resize_takes():
    net, batches = wide()
    net.calibrate_(batches, sizes=[0.3, 0.5])
    for macs in (0.3, 0.5):
        plan = net.resize_(macs=macs)
        assert plan.align == "auto"
        assert plan.ranks in {each.ranks for each in net._statistics.plans}
        assert_statistics(net.module, cumulative_average(net.extract(), batches))


def test_a_grid_is_one_of_rounded_sizes_and_serves_every_size():
    net, batches = wide()
    for _ in range(2):  # a grid replaces what is stored
        net.calibrate_(batches, passes=10)
        assert (net._statistics.alignments, net._statistics.grids) == ((1,), (1,))
        costs = {plan.macs for plan in net._statistics.plans}
        assert costs <= set(net.selector.all_costs("auto").tolist())
        assert not costs <= set(net.selector.all_costs(1).tolist())
    unrounded, _ = wide()
    unrounded.calibrate_(batches, passes=10, align=1)
    for align in ("auto", 1):
        assert error_of_variances(net, batches, align) <= 1.5 * error_of_variances(unrounded, batches, 1)
    before = len(net._statistics.plans)
    net.calibrate_(batches, sizes=[0.47], align=8)  # added
    assert (net._statistics.alignments, net._statistics.grids) == ((1, 8), (1,))
    assert len(net._statistics.plans) == before + 1
    with pytest.raises(InvalidArgumentError) as caught:
        net.calibrate_(batches, align="measured")
    assert (caught.value.option, caught.value.came) == ("align", "measured")


def test_the_full_size_and_a_calibrated_network_do_not_warn():
    net, batches = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.resize_(macs=1.0)
        net.calibrate_(batches, sizes=[0.5])
        net.resize_(macs=0.5)
        net.calibrate_(batches)
        net.resize_(macs=0.7)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False)),
    ],
    ids=["LayerNorm", "no running statistics"],
)
def test_without_running_statistics_there_is_nothing_to_warn_of_or_to_calibrate(model):
    net = decompose(model, torch.zeros(2, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.resize_(ratio=0.5)
    module = net.module

    def never():
        raise AssertionError("the data is not needed")
        yield

    report = net.calibrate_(never())
    assert (report.sizes, report.batches, report.bytes) == (0, 0, 0)
    assert net.module is module


# The report


def test_the_report_states_what_it_cost():
    net, batches = make()
    start = time.perf_counter()
    report = net.calibrate_(batches, sizes=[0.3, 0.5])
    assert 0 < report.seconds <= time.perf_counter() - start
    assert (report.sizes, report.batches) == (2, 3)
    channels = sum(net.module[i].num_features for i in NORMS)
    assert report.bytes == 2 * 2 * channels * 4  # sizes · (mean and variance) · float32


def test_the_report_of_exact_calibration_counts_the_batches_once():
    net, batches = make()
    assert net.calibrate_(batches, sizes=[0.3, 0.5], exact=True).batches == 3


def test_the_repr_tells_how_many_sizes_are_calibrated():
    net, batches = make()
    assert "0 sizes calibrated" in repr(net)
    net.calibrate_(batches, sizes=[0.3, 0.5])
    assert "2 sizes calibrated" in repr(net)


# Real weights


class Pretrained:
    """The ResNet-20 with its 1,000 test and 500 calibration images, standardised."""

    def __init__(self, folder):
        images = np.load(folder / "cifar10_ci_1k.npz")
        self.x, self.y = self.standardised(images["x_test"]), torch.from_numpy(images["y_test"]).long()
        self.batches = self.standardised(images["x_calib"]).split(125)
        state = torch.load(folder / "resnet20-12fca82f.th", map_location="cpu", weights_only=True)["state_dict"]
        self.model = models.resnet20().eval()
        self.model.load_state_dict({name.removeprefix("module."): t for name, t in state.items()})

    @staticmethod
    def standardised(images):
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        return (torch.from_numpy(images).float() / 255 - mean) / std

    @torch.inference_mode()
    def accuracy(self, net):
        hits = [net(x).argmax(1) == y for x, y in zip(self.x.split(250), self.y.split(250), strict=True)]
        return torch.cat(hits).float().mean().item()


@pytest.fixture(scope="module")
def pretrained(shared_data):
    return Pretrained(shared_data)


@pytest.mark.slow
def test_calibration_wins_back_accuracy(pretrained):
    net = decompose(pretrained.model, pretrained.x[:1])
    with pytest.warns(UserWarning, match="calibrate_"):
        net.resize_(macs=0.4)
    before = pretrained.accuracy(net)
    net.calibrate_(pretrained.batches, sizes=[0.4])
    after = pretrained.accuracy(net)
    assert after > before + 0.2
    assert after > 0.7


def test_a_batch_of_one_sample_is_refused_with_what_to_do():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    net = decompose(model, example_input=torch.zeros(1, 6))
    with refused("loader", 1, Saying("drop_last=True")):
        net.calibrate_([torch.randn(4, 6), torch.randn(1, 6)], sizes=[1.0])
