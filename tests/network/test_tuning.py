"""`tune_`: vectors of their own for some sizes. What it claims is computed here in another way and compared."""

import contextlib
import copy
import itertools
import math
import threading
from unittest.mock import ANY

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import decomposable as dn
from decomposable import decompose
from decomposable.network import artifact
from decomposable.network.calibration import batches as kept
from decomposable.network.file import container
from decomposable_edge.errors import ArtifactError
from refusals import Saying, refused

SIZES = [0.7, 0.4, 0.2]


class Small(nn.Module):
    """Biases in decomposed layers and elsewhere, three kinds of normalisation, one of which nothing feeds."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(12)
        self.body = nn.Conv2d(12, 16, 3, stride=2, padding=1)
        self.after_bn = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.5)
        self.hidden = nn.Linear(16, 24)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        x = torch.relu(self.stem_bn(self.stem(x)))
        x = self.after_bn(torch.relu(self.body(x)))
        return 4 * self.head(self.norm(self.hidden(self.drop(x.mean((2, 3))))))


def data(count=4):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, 3, 8, 8, generator=generator) for _ in range(count)]


def made(model=None):
    torch.manual_seed(0)
    model = model or Small()
    model.train()
    for batch in data():
        model(batch)
    return decompose(model.eval(), data()[0])


@pytest.fixture(scope="module")
def tuned_once():
    net = made()
    return net, net.tune_(data(), SIZES, steps=15, learning_rate=0.01, passes=10)


@pytest.fixture
def net(tuned_once):
    return copy.deepcopy(tuned_once[0])


def kl(low, full):
    """KL(full ‖ low), the mean over rows, from its definition."""
    p, q = (F.softmax(y.double(), dim=1) for y in (full, low))
    return float((p * (p / q).log()).sum(1).mean())


def with_batch_statistics(module, batch):
    module = copy.deepcopy(module).eval()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.train()
    with torch.no_grad():
        return module(batch)


def same_at(net, other, sizes=(1.0, 0.8, 0.7, 0.5, 0.33, 0.2, 0.15), **tolerance):
    x = data()[0]
    for size in sizes:
        net.resize_(macs=size)
        other.resize_(macs=size)
        torch.testing.assert_close(other(x), net(x), **(tolerance or {"rtol": 0, "atol": 0}))


def test_the_full_size_and_all_matrices_stay(tuned_once):
    net, untouched = tuned_once[0], made()
    x = data()[0]
    assert torch.equal(net.extract(net.selector.full_plan())(x), untouched(x))
    for size in (*SIZES, 0.5):
        plan = net.selector.of_size(size)
        before, after = untouched.extract(plan), net.extract(plan)
        own, moved = dict(before.named_parameters()), 0
        assert own.keys() == dict(after.named_parameters()).keys()
        for name, parameter in after.named_parameters():
            if parameter.dim() > 1:
                assert torch.equal(parameter, own[name]), name
            else:
                moved += not torch.equal(parameter, own[name])
        assert moved


def test_the_distance_falls_by_an_evaluation_of_its_own(tuned_once):
    net, report = tuned_once
    untouched, x = made(), data()[0]
    full = untouched(x)
    assert report.sizes == tuple(net.selector.of_size(size).macs_fraction for size in SIZES)
    for size, before, after in zip(SIZES, report.before, report.after, strict=True):
        plan = net.selector.of_size(size)
        assert before == pytest.approx(kl(with_batch_statistics(untouched.extract(plan), x), full), rel=1e-4)
        assert after == pytest.approx(kl(with_batch_statistics(net.extract(plan), x), full), rel=1e-4)
        assert after < 0.8 * before
    assert report.steps == 15
    assert report.seconds > 0
    assert report.calibration.sizes > 3
    assert report.bytes == len(SIZES) * sum(p.numel() for p in Small().parameters() if p.dim() <= 1) * 4


def test_between_two_sizes_each_vector_lies_where_the_rank_of_its_layer_does(net):
    low, high, plan = (net.selector.of_size(size) for size in (0.2, 0.4, 0.3))
    at = {each: dict(net.extract(each).named_parameters()) for each in (low, high, plan)}

    def of(each, name):
        layer, _, kind = name.rpartition(".")
        return at[each].get(name, at[each].get(f"{layer}.1.{kind}")).detach().double()

    of_size = (plan.macs - low.macs) / (high.macs - low.macs)
    places = {"stem_bn": "stem", "body": "body", "hidden": "hidden", "head": "head", "after_bn": None, "norm": None}
    for name, vector in Small().named_parameters():
        if vector.dim() > 1:
            continue
        layer = places[name.rpartition(".")[0]]
        place = of_size
        if layer is not None and high.ranks[layer] != low.ranks[layer]:
            place = (plan.ranks[layer] - low.ranks[layer]) / (high.ranks[layer] - low.ranks[layer])
        place = min(1.0, max(0.0, place))
        expected = of(low, name) + place * (of(high, name) - of(low, name))
        torch.testing.assert_close(of(plan, name), expected, rtol=1e-5, atol=1e-6)


def test_below_the_smallest_tuned_size_its_vectors_hold_and_above_the_largest_they_near_the_originals(net):
    smallest = dict(net.extract(net.selector.of_size(0.2)).named_parameters())["norm.weight"]
    below = dict(net.extract(net.selector.of_size(0.15)).named_parameters())["norm.weight"]
    assert torch.equal(smallest, below)
    high, plan = net.selector.of_size(0.7), net.selector.of_size(0.85)
    own = dict(net.extract(high).named_parameters())["norm.weight"]
    place = (plan.macs_fraction - high.macs_fraction) / (1 - high.macs_fraction)
    found = dict(net.extract(plan).named_parameters())["norm.weight"]
    torch.testing.assert_close(found, own + place * (1 - own))


def test_a_file_gives_the_same_network_whole_and_in_part(net, tmp_path):
    path = tmp_path / "net.safetensors"
    net.save(path)
    whole = dn.load(path, model=Small())
    same_at(net, whole)
    for size in (0.8, 0.5, 0.2):
        part = dn.load(path, model=Small(), macs=size)
        same_at(net, part, sizes=[s for s in (size, 0.33, 0.2, 0.15) if s <= size])
        assert part._tuned.bytes <= net._tuned.bytes
        part.save(tmp_path / "part.safetensors")
        same_at(
            part, dn.load(tmp_path / "part.safetensors", model=Small()), sizes=[s for s in (0.2, 0.15) if s <= size]
        )
    assert len(dn.load(path, model=Small(), macs=0.2)._tuned.plans) < len(SIZES)
    again = tmp_path / "again.safetensors"
    whole.resize_(macs=net.plan().macs)
    whole.save(again)
    assert load_file(path).keys() == load_file(again).keys()


def test_one_size_as_a_plain_file_is_what_is_extracted(net, tmp_path):
    x = data()[0]
    for size in (0.8, 0.3):
        plan = net.selector.of_size(size)
        expected = net.extract(plan).state_dict()
        found = artifact.size_state_dict(net.artifact(), plan)
        assert list(found) == list(expected)
        assert all(torch.equal(found[key], expected[key]) for key in found)
        artifact.save_size(net, plan, tmp_path / "size.safetensors")
        assert torch.equal(dn.load(tmp_path / "size.safetensors", model=Small()).eval()(x), net.extract(plan)(x))


def test_copies_moves_and_casts_keep_it(net):
    same_at(net, copy.deepcopy(net))
    double = copy.deepcopy(net).double()
    plan = net.selector.of_size(0.3)
    torch.testing.assert_close(
        double.extract(plan).norm.weight, net.extract(plan).norm.weight.double(), rtol=1e-6, atol=1e-6
    )


def test_a_network_that_is_not_tuned_has_no_entry(tmp_path):
    net = made()
    net.calibrate_(data(), sizes=[0.5])
    net.save(tmp_path / "net.safetensors")
    description, tensors = container.read_container(tmp_path / "net.safetensors")
    assert description["tuned"] is None
    assert not any(name.startswith("tuned") for name in tensors)
    assert dn.load(tmp_path / "net.safetensors", model=Small())._tuned is None


def test_statistics_are_calibrated_anew_a_grid_or_the_chosen_sizes(net):
    assert net._statistics.grids == (1,)
    chosen = made()
    chosen.calibrate_(data(), sizes=[0.5, 0.3])
    chosen.calibrate_(data(), sizes=[0.4], align=4)
    before = chosen._statistics
    chosen.tune_(data(), [0.4], steps=2)
    after = chosen._statistics
    assert after.plans == before.plans
    assert after.alignments == before.alignments == (1, 4)
    assert after.grids == ()
    assert not torch.equal(after.mean_SC, before.mean_SC)
    plan = chosen.selector.of_size(0.3)
    module = made_like(chosen, plan)
    expected = dict(module.named_buffers())
    for name, buffer in chosen.extract(plan).named_buffers():
        if "running" in name:
            torch.testing.assert_close(buffer, expected[name])


def made_like(net, plan):
    """The network of a size with statistics that torch averages itself."""
    module = net.extract(plan).eval()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.reset_running_stats()
            part.momentum = None
            part.train()
    with torch.no_grad():
        for batch in data():
            module(batch)
    return module


def test_a_full_size_with_statistics_of_its_own_keeps_them():
    net = made()
    net.calibrate_(data(2), sizes=[1.0, 0.5])
    net.resize_(macs=1.0)
    before = net(data()[0])
    net.tune_(data(), [0.5], steps=2)
    assert torch.equal(net(data()[0]), before)


def test_forgetting_takes_everything_back(net):
    untouched = made()
    net.forget_tuning_()
    with pytest.warns(UserWarning, match="full network's statistics"):
        plan = net.resize_(macs=0.3)
    assert torch.equal(net(data()[0]), untouched.extract(plan)(data()[0]))
    net.calibrate_(data(), sizes=[0.3])
    net.forget_tuning_()  # there is none: the statistics stay
    assert net._statistics is not None


def test_tuning_again_replaces_and_begins_at_the_originals(net):
    twin = made()
    for each in (net, twin):
        each.tune_(data(), [0.5, 0.25], steps=3, passes=5)
    assert net._tuned.positions == twin._tuned.positions
    assert torch.equal(net._tuned.values_ST, twin._tuned.values_ST)


def test_a_part_of_a_network_can_be_tuned_and_its_largest_size_keeps_its_vectors(net, tmp_path):
    net.save(tmp_path / "net.safetensors")
    part = dn.load(tmp_path / "net.safetensors", model=Small(), macs=0.5)
    largest = part.plan()
    before = dict(part.extract(largest).named_parameters())
    part.tune_(data(), [0.3, 0.2], steps=3, passes=5)
    for name, parameter in part.extract(largest).named_parameters():
        assert torch.equal(parameter, before[name]), name
    smaller = dict(part.extract(part.selector.of_size(0.3)).named_parameters())
    assert not torch.equal(smaller["norm.weight"], before["norm.weight"])


@pytest.mark.parametrize("first", ["tune_", "calibrate_"])
def test_tuning_a_part_of_a_network_leaves_its_largest_size_as_it_is(first, tmp_path):
    whole = made()
    if first == "tune_":
        whole.tune_(data(), [0.5, 0.25], steps=3, passes=5)
    else:
        whole.calibrate_(data(), passes=5)
    whole.save(tmp_path / "net.safetensors")
    part = dn.load(tmp_path / "net.safetensors", model=Small(), macs=0.45)
    largest, x = part.plan(), data()[0]
    before = part(x)
    part.tune_(data(), [0.3, 0.2], steps=3, passes=5)
    part.resize_(largest)
    assert torch.equal(part(x), before)


def test_a_part_of_a_network_that_forgets_its_tuning_has_the_original_vectors(net, tmp_path):
    net.save(tmp_path / "net.safetensors")
    part = dn.load(tmp_path / "net.safetensors", model=Small(), macs=0.5)
    part.forget_tuning_()
    wanted = dict(made().extract(part.selector.of_size(0.3)).named_parameters())
    for name, parameter in part.extract(part.selector.of_size(0.3)).named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, wanted[name]), name


def test_chosen_sizes_beside_a_grid_cost_what_they_are_and_not_the_grid_again(net):
    net.calibrate_(data(), passes=12)
    net.calibrate_(data(), sizes=[0.7, 0.5], align=4)
    chosen = [net.selector.of_size(size, align=4).ranks for size in (0.7, 0.5)]
    report = net.tune_(data(), [0.5], steps=2, passes=5)
    assert report.calibration.passes < 5 + 0.7 + 0.5 + 0.1
    assert {*chosen} <= {plan.ranks for plan in net._statistics.plans}


def test_without_batch_normalisation_there_is_nothing_to_calibrate():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 6))
    batches = list(torch.randn(40, 12).split(8))
    net = decompose(model.eval(), batches[0])
    report = net.tune_(batches, [0.5], steps=20, learning_rate=0.02)
    assert report.calibration is None
    assert report.after[0] < report.before[0]
    assert net._statistics is None


class Tied(nn.Module):
    """Two layers with one bias, one of them decomposed elsewhere than the other; and one layer used under two names."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 6)
        self.b.bias = self.a.bias
        self.again = self.a
        self.lstm = nn.LSTM(12, 12, batch_first=True)

    def forward(self, x):
        x = self.again(torch.relu(self.b(torch.relu(self.a(x)))))
        return self.head(self.lstm(x[:, None])[0][:, 0])


def test_a_bias_that_two_layers_have_stays_one(tmp_path):
    torch.manual_seed(0)
    batches = list(torch.randn(40, 12).split(8))
    net = decompose(Tied().eval(), batches[0], filter_fn=lambda _, name: not name.startswith("lstm"))
    net.tune_(batches, [0.85], steps=5)
    assert "a.bias" in net._tuned.names
    assert "b.bias" not in net._tuned.names
    assert not any(name.startswith("lstm") for name in net._tuned.names)  # it holds them in a list, too
    net.resize_(macs=0.85)
    module = net.extract()
    biases = {name: p for name, p in module.named_parameters(remove_duplicate=False) if name.endswith("bias")}
    a, b = (next(p for name, p in biases.items() if name.startswith(f"{layer}.")) for layer in "ab")
    assert a is b
    assert not torch.equal(a, net._base.a.bias)
    net.save(tmp_path / "net.safetensors")
    for loaded in (dn.load(tmp_path / "net.safetensors", model=Tied(), **size) for size in ({}, {"macs": 0.85})):
        loaded.resize_(macs=0.85)
        assert torch.equal(loaded(batches[0]), net(batches[0]))
    state = artifact.size_state_dict(net.artifact(), net.plan())
    assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())


def test_a_loader_that_ends_is_kept_and_gone_through_again(monkeypatch):
    one, other = made(), made()
    one.tune_(data(2), [0.4], steps=5, passes=5)
    other.tune_(iter(data(2)), [0.4], steps=5, passes=5)
    assert torch.equal(one._tuned.values_ST, other._tuned.values_ST)
    monkeypatch.setattr(kept, "MOST_KEPT", 1000)
    with refused("loader", allowed=Saying("^fewer images, or one that begins anew")):
        made().tune_(iter(data(2)), [0.4], steps=5)


def test_batches_are_taken_in_turn_and_the_loader_begins_anew():
    class Counting:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(data(3))

    seen = []

    def forward(net, batch):
        if net.training is False and torch.is_grad_enabled():
            seen.append(batch[0, 0, 0, 0].item())
        return net(batch)

    loader = Counting()
    made().tune_(loader, [0.4], steps=5, forward=forward, passes=5)
    _, second, third = (batch[0, 0, 0, 0].item() for batch in data(3))
    assert seen == [second, third, second, third, second]  # the first one is for comparing
    assert loader.passes == 4  # three for 1 + 5 batches, one to calibrate


def test_a_loader_of_one_batch_learns_from_it_and_one_of_two_from_the_other():
    def seen_of(count):
        seen = []

        def forward(net, batch):
            if net.training is False and torch.is_grad_enabled():
                seen.append(batch[0, 0, 0, 0].item())
            return net(batch)

        made().tune_(data(count), [0.4], steps=4, forward=forward, passes=5)
        return seen

    first, second = (batch[0, 0, 0, 0].item() for batch in data(2))
    assert seen_of(1) == [first] * 4
    assert seen_of(2) == [second] * 4


def test_what_is_learnt_by_heart_goes_only_as_far_as_another_batch_allows():
    """The images that are learnt from are noise of another scale than those that are judged by."""
    generator = torch.Generator().manual_seed(3)
    judged = data(1)[0]
    noise = [8 * torch.randn(judged.shape, generator=generator) for _ in range(2)]
    net = made()
    report = net.tune_([judged, *noise], [0.4], steps=20, learning_rate=0.3, passes=5)
    assert report.after[0] <= report.before[0]


def test_dicts_with_a_forward_of_ones_own():
    batches = [{"label": torch.zeros(16), "image": batch} for batch in data()]
    net, plain = made(), made()
    net.tune_(batches, [0.4], steps=3, passes=5, forward=lambda net, batch: net(batch["image"]))
    plain.tune_([(batch, 0) for batch in data()], [0.4], steps=3, passes=5)
    assert torch.equal(net._tuned.values_ST, plain._tuned.values_ST)


def test_a_distance_of_ones_own():
    net = made()
    report = net.tune_(data(), [0.4], steps=10, passes=5, distance=F.mse_loss)
    x, plan = data()[0], net.selector.of_size(0.4)
    expected = F.mse_loss(with_batch_statistics(net.extract(plan), x), made()(x)).item()
    assert report.after[0] == pytest.approx(expected, rel=1e-4)
    assert report.after[0] < report.before[0]


def test_usual_sizes_are_those_that_the_network_can_have():
    net = made()
    report = net.tune_(data(), steps=1, passes=5)
    assert 1 <= len(report.sizes) <= 8
    assert list(report.sizes) == sorted(report.sizes, reverse=True)
    assert all(net.selector.smallest_size <= size < 1 for size in report.sizes)


def test_a_size_that_training_does_not_help_keeps_the_originals_vectors():
    net = made()
    report = net.tune_(data(), [0.9], steps=2, learning_rate=30.0, passes=5)
    assert report.after == report.before
    assert torch.equal(net._tuned.values_ST[0], net._tuned.original[0])


@pytest.mark.parametrize(
    ("arguments", "option", "came", "allowed"),
    [
        ({"sizes": []}, "sizes", [], "at least one size"),
        ({"sizes": 0.5}, "sizes", 0.5, Saying("^a list of sizes")),
        ({"sizes": [0.5, 1.0]}, "sizes", 1.0, "smaller ones"),
        ({"sizes": [1e-9]}, "macs", 1e-9, ANY),
        ({"steps": 0}, "steps", 0, "an int of at least 1"),
        ({"learning_rate": 0}, "learning_rate", 0, "a number above 0"),
        ({"learning_rate": math.nan}, "learning_rate", math.nan, "a number above 0"),
        ({"distance": "kl"}, "distance", "kl", Saying("^a function")),
        ({"passes": 1}, "passes", 1, "a number of at least 3"),
        ({"loader": []}, "loader", 0, Saying("^one that begins anew")),
        ({"loader": 5}, "loader", 5, "what yields batches"),
        ({"loader": [torch.full((4, 3, 8, 8), math.nan)]}, "loader", 1, "numbers only"),
        ({"loader": [torch.full((4, 3, 8, 8), math.inf)]}, "distance", Saying("^nan$"), Saying("^finite inputs")),
        ({"distance": lambda low, full: low - full}, "distance", "a tensor of shape (16, 5)", "a tensor of one number"),
        ({"distance": lambda low, full: 0.5}, "distance", "float", "a tensor of one number"),
        ({"distance": lambda low, full: (low - full).detach().sum()}, "distance", None, Saying("^forward= and dist")),
        (
            {"forward": lambda net, batch: net(batch)[:, :, None]},
            "distance",
            Saying(r"\(16, 5, 1\)$"),
            Saying("logits"),
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_and_nothing_changes(arguments, option, came, allowed):
    net = made()
    x = data()[0]
    plan = net.selector.of_size(0.4)
    before = net.extract(plan)(x)
    with refused(option, came, allowed):
        net.tune_(**{"loader": data(), "steps": 2, **arguments})
    assert net._tuned is None
    assert net._statistics is None
    assert torch.equal(net.extract(plan)(x), before)


def test_one_sample_has_no_variance():
    torch.manual_seed(0)
    net = decompose(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval(), torch.randn(4, 8))
    with refused("loader", 1, Saying("drop_last=True")):
        net.tune_([torch.randn(1, 8)], [0.7], steps=1)


def test_a_network_without_vectors_is_refused():
    net = decompose(nn.Linear(8, 8, bias=False), torch.randn(4, 8))
    with refused("network", 0, "one that has some"):
        net.tune_([torch.randn(4, 8)], steps=1)


def test_a_failure_in_the_middle_changes_nothing(net):
    before, calls = (net._tuned, net._statistics), itertools.count()

    def failing(module, batch):
        if next(calls) == 9:
            raise RuntimeError("in the middle")
        return module(batch)

    with pytest.raises(RuntimeError, match="in the middle"):
        net.tune_(data(), [0.4], steps=20, forward=failing)
    assert (net._tuned, net._statistics) == before


def test_modes_random_numbers_and_surroundings_stay():
    net = made().train()
    state = torch.get_rng_state()
    with torch.inference_mode():
        net.tune_(data(), [0.4], steps=2, passes=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in net.modules())
    assert not any(p.requires_grad for p in net.parameters())
    assert all(p.grad is None for p in net._base.parameters())
    assert all(p.requires_grad for p in net.extract(net.selector.of_size(0.4)).parameters())


@pytest.mark.filterwarnings("ignore:batch normalisation still has")
def test_other_threads_run_and_resize_meanwhile():
    net, x, errors, done = made(), data()[0], [], threading.Event()
    full = net(x)

    def use():
        while not done.is_set():
            try:
                net.resize_(net.selector.full_plan())
                assert net(x).shape == full.shape
                net.resize_(net.selector.of_size(0.4))
            except Exception as error:  # it is looked at below
                errors.append(error)
                return

    thread = threading.Thread(target=use)
    thread.start()
    net.tune_(data(), [0.5, 0.3], steps=5, passes=5)
    done.set()
    thread.join()
    assert not errors
    net.resize_(net.selector.full_plan())
    assert torch.equal(net(x), full)


def test_half_precision_is_tuned_in_single(tmp_path):
    torch.manual_seed(0)
    batches = [batch.bfloat16() for batch in torch.randn(40, 12).split(8)]
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 6)).bfloat16()
    net = decompose(model.eval(), batches[0])
    report = net.tune_(batches, [0.5], steps=30, learning_rate=0.02)
    assert report.after[0] < report.before[0]
    assert net._tuned.values_ST.dtype == torch.bfloat16
    net.save(tmp_path / "net.safetensors")
    loaded = dn.load(tmp_path / "net.safetensors", model=copy.deepcopy(model))
    for each in (net, loaded):
        each.resize_(macs=0.5)
    assert torch.equal(net(batches[0]), loaded(batches[0]))


def test_progress_is_told():
    lines = []
    made().tune_(data(), [0.5, 0.3], steps=2, passes=5, progress=lines.append)
    assert lines[0].startswith("tuning: 1 of 4 steps, 0.4")
    assert any(line.startswith("calibrating") for line in lines)


def _set(name, change):
    def spoil(description, tensors):
        tensors[name] = change(tensors[name].clone())

    return spoil


def _filled(place, value):
    def change(tensor):
        tensor[place] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d, t: t.pop("tuned/values"), "tensor 'tuned/values' is missing"),
        (lambda d, t: t.pop("tuned/ranks"), "tuned values are of 0 sizes"),
        (lambda d, t: d.pop("tuned"), "'tuned' of the file is missing"),
        (lambda d, t: d.update(tuned=None), "tensor 'tuned/.*' belongs to nothing"),
        (lambda d, t: d.update(tuned=[]), "tuned is not an object"),
        (lambda d, t: d["tuned"].pop("names"), "'names' of tuned is missing"),
        (lambda d, t: d["tuned"].update(names=[]), "tuned parameters are none"),
        (lambda d, t: d["tuned"]["names"].append(d["tuned"]["names"][0]), "or one is there twice"),
        (lambda d, t: d["tuned"]["names"].__setitem__(0, "nothing.bias"), "'nothing.bias' is tuned, and no vector"),
        (lambda d, t: d["tuned"]["names"].__setitem__(0, "stem.weight"), "'stem.weight' is tuned, and no vector"),
        (lambda d, t: d["tuned"]["names"].__setitem__(0, "stem_bn.running_mean"), "is tuned, and no vector"),
        (lambda d, t: d["tuned"]["names"].remove("norm.bias"), "tensor 'tuned/values' is"),
        (
            lambda d, t: d["tuned"]["layer_before_norm"].update({"stem_bn.weight": "nothing"}),
            "lies where a layer is that is not",
        ),
        (lambda d, t: d["tuned"]["layer_before_norm"].update({"nothing": "stem"}), "lies where a layer is that is not"),
        (_set("tuned/values", lambda t: t[:, 1:].contiguous()), "tensor 'tuned/values' is"),
        (_set("tuned/values", lambda t: t.long()), "tensor 'tuned/values' is int64"),
        (_set("tuned/values", lambda t: t.double()), "tuned values are of several types"),
        (_set("tuned/values", _filled((0, 0), float("nan"))), "tuned values are NaN or infinite"),
        (_set("tuned/original", _filled(0, float("inf"))), "tuned values are NaN or infinite"),
        (_set("tuned/positions", lambda t: t.flip(0)), "tuned values are not in order"),
        (_set("tuned/positions", _filled(0, float("nan"))), "tuned values are not in order"),
        (_set("tuned/ranks", _filled((0, 0), 0)), "tuned values are of ranks that cannot be"),
        (_set("tuned/ranks", _filled((0, 0), 10**6)), "tuned values are of ranks that cannot be"),
    ],
)
def test_damaged_entries_are_refused(tuned_once, tmp_path, spoil, message):
    path, spoilt = tmp_path / "net.safetensors", tmp_path / "spoilt.safetensors"
    tuned_once[0].save(path)
    description, tensors = container.read_container(path)
    spoil(description, tensors)
    container.write_container(spoilt, description, tensors)
    with refused(kind=ArtifactError, path=spoilt, reason=Saying(message)):
        dn.load(spoilt, model=Small())


def test_whatever_the_entries_claim_is_refused_or_loads(tuned_once, tmp_path):
    path, spoilt = tmp_path / "net.safetensors", tmp_path / "spoilt.safetensors"
    tuned_once[0].save(path)
    random = np.random.default_rng(0)
    names = ["tuned/values", "tuned/original", "tuned/ranks", "tuned/dense", "tuned/positions"]
    for _ in range(40):
        description, tensors = container.read_container(path)
        name = names[random.integers(len(names))]
        tensor = tensors[name].clone()
        if random.integers(2):
            tensor = tensor[: random.integers(len(tensor) + 1)]
        elif tensor.is_floating_point():
            tensor.view(-1)[random.integers(tensor.numel())] = random.choice([np.nan, -np.inf, -1, 1e9])
        else:
            tensor.view(-1)[random.integers(tensor.numel())] = int(random.choice([0, -1, 1, 2**40]))
        tensors[name] = tensor.clone()
        container.write_container(spoilt, description, tensors)
        for size in ({}, {"macs": 0.3}):
            with contextlib.suppress(ArtifactError):
                dn.load(spoilt, model=Small(), **size).resize_(macs=0.25)
