"""The grid of sizes that `calibrate_` makes by itself, and what happens to sizes that lie far from calibrated ones."""

import functools
import itertools
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import decomposable as dn
import decomposable.network.calibration.batches as batches_module
import decomposable.network.calibration.grid as grid_module
from decomposable import decompose, recipes
from decomposable.commands.main import main
from decomposable.network.calibration.grid import _coarse, _middle
from decomposable_edge.sizing.plans import SizeRequest
from refusals import refused

few = settings(max_examples=15, deadline=None, derandomize=True)


def cnn(width=32):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * width, 5),
    )


def make(sizes=None, **options):
    """A network with statistics of its own, and batches of images whose channels differ."""
    torch.manual_seed(0)
    model = cnn()
    batches = list((torch.randn(96, 3, 8, 8) * torch.tensor([3.0, 1.0, 0.3]).view(3, 1, 1) + 0.5).split(16))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    net = decompose(model.eval(), batches[0])
    if sizes is not None or options:
        net.calibrate_(batches, sizes, **options)
    return net, batches


@functools.cache
def gridded(passes):
    """The same with a grid, made once: to be resized, and not otherwise changed."""
    return make(passes=passes)


def warned(action):
    """What an action warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]


# The grid


def test_the_grid_goes_from_the_smallest_size_to_the_largest():
    net, _ = make(passes=60)
    plans = net.artifact().statistics.plans
    assert plans[0].ranks == net.selector.smallest_plan().ranks
    assert plans[-1].is_full
    assert net.artifact().statistics.grids == (1,)


def test_effort_is_counted_as_torch_counts_it():
    net, batches = make()
    with FlopCounterMode(display=False) as counter:
        report = net.calibrate_(batches, passes=20)
    full = net.plan().full_macs * sum(map(len, batches))
    assert report.passes == pytest.approx(counter.get_total_flops() / 2 / full, rel=0.01)
    assert report.passes <= 20
    assert report.batches == len(batches)


@pytest.mark.parametrize("passes", [3, *(pytest.param(passes, marks=pytest.mark.slow) for passes in (5, 12.5))])
def test_it_stops_at_the_effort_and_says_so(passes):
    net, batches = make()
    report = net.calibrate_(batches, passes=passes)
    assert report.passes <= passes
    more = net.calibrate_(batches, passes=1000)
    assert more.is_settled
    assert more.sizes >= report.sizes
    assert report.is_settled == (more.sizes == report.sizes)


@pytest.mark.parametrize("passes", [0, 2.9, -1, math.inf, math.nan, "60", True])
def test_an_effort_that_cannot_be_is_refused(passes):
    net, batches = make()
    with refused("passes", passes, "a number of at least 3"):
        net.calibrate_(batches, passes=passes)


def test_it_refines_where_outputs_differ_and_nowhere_else(monkeypatch):
    """A network whose outputs do not depend on its statistics needs the coarse grid and a size in each gap of it."""
    net, batches = make()
    blind = nn.Sequential(*cnn()[:-1], nn.Linear(512, 5))
    nn.init.zeros_(blind[-1].weight)
    other = decompose(blind.eval(), batches[0])
    needs, needs_not = net.calibrate_(batches, passes=500), other.calibrate_(batches, passes=500)
    assert needs.is_settled
    assert needs_not.is_settled
    coarse = len(_coarse(other.selector.all_costs(), other.selector.full_cost("macs"), 500))
    assert needs_not.sizes <= 2 * coarse - 1 < needs.sizes


@pytest.mark.parametrize("size", [0.13, 0.2, 0.33, 0.5, 0.62, 0.81])
def test_statistics_of_every_size_are_close_to_its_own(size):
    """In outputs: nearer than the statistics of a neighbouring size of the coarse grid would be."""
    net, batches = gridded(passes=200)
    x = torch.cat(batches)
    net.resize_(macs=size)
    stored = net(x)
    own = decompose_calibrated(net, batches, size)(x)
    assert float((stored - own).norm() / (own - own.mean(0)).norm()) < 0.1


def decompose_calibrated(net, batches, size):
    """The same network, calibrated at exactly this size."""
    twin = make()[0]
    twin.calibrate_(batches, sizes=[size])
    twin.resize_(macs=size)
    assert twin.plan() == net.plan()
    return twin


def test_a_refined_size_is_what_measuring_it_on_all_batches_gives_where_the_part_is_all():
    net, batches = make()
    one = [torch.cat(batches)]
    net.calibrate_(one, passes=100, forward=lambda net, x: net(x))  # of which nobody knows how to take a part
    statistics = net.artifact().statistics
    for plan in statistics.plans[:: len(statistics.plans) // 5]:
        net.resize_(plan)
        found = {name: tensor.clone() for name, tensor in net.extract().state_dict().items()}
        twin = make()[0]
        twin.calibrate_(one, sizes=[max(2, plan.macs)])
        twin.resize_(plan)
        for name, tensor in twin.extract().state_dict().items():
            if "running" in name and not plan.is_full:
                torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


@few
@given(costs=st.lists(st.integers(1, 10**9), min_size=1, max_size=60, unique=True), passes=st.floats(3, 1000))
def test_the_coarse_grid_has_both_ends_and_each_size_once(costs, passes):
    import numpy as np

    ordered = np.array(sorted(costs))
    chosen = _coarse(ordered, int(ordered[-1]), passes)
    assert chosen == sorted(set(chosen))
    assert (chosen[0], chosen[-1]) == (0, len(ordered) - 1)
    for low, high in itertools.pairwise(chosen):
        assert high - low < 2 or low < _middle(ordered, low, high) < high


# The loader


def test_a_loader_is_gone_through_once_and_may_be_a_generator():
    net, batches = make()
    net.calibrate_(batches)
    expected = net.artifact().statistics
    seen = []
    net.calibrate_(seen.append(batch) or batch for batch in batches)
    assert len(seen) == len(batches)
    torch.testing.assert_close(net.artifact().statistics.mean_SC, expected.mean_SC)


def test_no_more_than_a_stated_memory_is_kept(monkeypatch):
    net, batches = make()
    monkeypatch.setattr(batches_module, "MOST_KEPT", 1)
    assert net.calibrate_(iter(batches)).batches == len(batches)  # the first batch alone is kept then


def test_progress_is_shown():
    net, batches = make()
    lines = []
    net.calibrate_(batches, progress=lines.append)
    assert lines[0].startswith("calibrating: ")
    sizes = len(net.artifact().statistics.plans)
    assert lines[-1].detail.startswith(f"{sizes} of about {sizes} sizes")
    assert lines == sorted(lines, key=lambda line: line.fraction)
    lines.clear()
    net.calibrate_(batches, sizes=[0.5], progress=lines.append)
    assert lines[-1].startswith("calibrating: 6 of 6 batches")


def test_how_many_sizes_there_will_be_is_told_before_they_are_measured():
    """Within a factor of two from a quarter of the work on: no bound, but what one may expect."""
    net, batches = make()
    lines = []
    sizes = net.calibrate_(batches, passes=500, progress=lines.append).sizes
    told = [int(line.detail.split(" of about ")[1].split()[0]) for line in lines if line.fraction > 0.25]
    assert all(sizes / 2 <= each <= 2 * sizes for each in told)


def test_no_more_is_expected_than_the_effort_allows():
    net, batches = make()
    lines = []
    few, enough = net.calibrate_(batches, passes=3, progress=lines.append), len(lines)
    net.calibrate_(batches, passes=500, progress=lines.append)
    about = [int(line.detail.split(" of about ")[1].split()[0]) for line in lines]
    assert not few.is_settled
    assert max(about[:enough]) < max(about[enough:])


def test_a_size_that_has_no_other_beside_it_is_measured_and_not_judged(monkeypatch):
    """Its own statistics are stored: there is nothing to interpolate between it and its neighbours."""
    judged, widths = [], {}
    calling, halving = grid_module._Judge.__call__, grid_module._middle

    def judge(self, *args):
        judged.append(list(widths)[-1])
        return calling(self, *args)

    def middle(costs, low, high):
        place = halving(costs, low, high)
        widths[int(costs[place])] = high - low
        return place

    monkeypatch.setattr(grid_module._Judge, "__call__", judge)
    monkeypatch.setattr(grid_module, "_middle", middle)
    net, batches = make()
    net.calibrate_(batches, passes=500)
    assert 2 in widths.values()
    assert sorted(judged) == sorted(macs for macs, width in widths.items() if width > 2)
    assert set(widths) <= {plan.macs for plan in net.artifact().statistics.plans}


def test_what_progress_raises_ends_it_and_nothing_changes():
    net, batches = make(sizes=[0.5])
    before = net.artifact().statistics

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        net.calibrate_(batches, progress=stop)
    assert net.artifact().statistics is before


# Sizes far from calibrated ones


def neighbours(net, least, most):
    """What a size costs and what the next one costs, which is so much larger; from the middle of all sizes."""
    costs = net.selector.all_costs().tolist()
    pairs = [(a, b) for a, b in itertools.pairwise(costs) if least < b / a - 1 <= most]
    return pairs[len(pairs) // 2]


def test_a_size_too_far_from_every_calibrated_one_steps_down_where_that_keeps_most_of_the_budget():
    net, batches = make()
    below, here = neighbours(net, 0.02, 0.1)
    net.calibrate_(batches, sizes=[below, 1.0])
    calibrated = net.resize_(macs=below)
    assert warned(lambda: net.resize_(macs=here)) == []
    assert net.plan() == calibrated
    assert net.plan().instead_of == here / net.plan().full_macs
    assert f"the nearest calibrated size below {net.plan().instead_of:.3f}x" in str(net.plan())
    assert "nearest calibrated" not in str(calibrated)


def test_else_it_warns_once():
    net, _ = make(sizes=[0.5, 0.25, 0.1])
    [text] = warned(lambda: [net.resize_(macs=size) for size in (0.15, 0.16, 0.4)])
    assert "calibrated for 0.0" in text or "calibrated for 0.1" in text
    assert "too far from this size of 0.1" in text
    assert "decomposable calibrate FILE" in text
    assert net.plan().ranks == net.selector.plan_for(SizeRequest(macs=0.4)).ranks  # the longest prefix
    assert net.plan().instead_of is None


def test_a_size_near_a_calibrated_one_is_taken_without_a_word():
    net, batches = make()
    below, here = neighbours(net, 0, 0.01)
    net.calibrate_(batches, sizes=[below, 1.0])
    assert warned(lambda: net.resize_(macs=here)) == []
    assert net.plan().macs == here
    assert net.plan().instead_of is None


def test_given_ranks_and_the_full_size_are_taken_as_they_are():
    net, _ = make(sizes=[0.25])
    assert warned(lambda: net.resize_(macs=1.0)) == []
    assert net.plan().is_full
    [text] = warned(lambda: net.resize_(ranks={"0": 3, "3": 5, "7": 2}))
    assert "too far" in text
    assert net.plan().ranks == {"0": 3, "3": 5, "7": 2}


def test_parameters_step_down_or_warn_and_a_ratio_warns():
    net, _ = make(sizes=[0.5])
    messages = warned(lambda: net.resize_(params=0.33))
    assert net.plan().instead_of is not None or "too far" in messages[0]
    net, _ = make(sizes=[0.5])
    assert "too far" in warned(lambda: net.resize_(ratio=0.33))[0]
    assert net.plan().ranks == net.selector.plan_for(SizeRequest(ratio=0.33)).ranks


@few
@given(size=st.floats(0.05, 1), align=st.sampled_from([None, "auto"]))
def test_sizes_inside_a_grid_neither_warn_nor_step_down(size, align):
    net, _ = gridded(passes=10)
    smallest = net.selector.smallest_size
    assert warned(lambda: net.resize_(macs=max(size, smallest + 1e-6), align=align)) == []
    assert net.plan().instead_of is None


def test_a_file_keeps_what_is_a_grid(tmp_path):
    net, _ = make(passes=10)
    net.save(tmp_path / "grid.safetensors")
    loaded = dn.load(tmp_path / "grid.safetensors", model=cnn())
    assert warned(lambda: loaded.resize_(macs=0.37)) == []
    part = dn.load(tmp_path / "grid.safetensors", model=cnn(), macs=0.4)
    assert warned(lambda: part.resize_(macs=0.37)) == []
    sparse, batches = make()
    below, here = neighbours(sparse, 0.02, 0.1)
    sparse.calibrate_(batches, sizes=[below, 1.0])
    sparse.save(tmp_path / "sparse.safetensors")
    loaded = dn.load(tmp_path / "sparse.safetensors", model=cnn())
    assert "too far" in warned(lambda: loaded.resize_(macs=0.9))[0]
    part = dn.load(tmp_path / "sparse.safetensors", model=cnn(), macs=here)
    assert part.plan().instead_of == here / part.plan().full_macs
    assert part.plan().macs == below


def test_rounded_sizes_are_a_grid_of_their_own():
    net, batches = make(passes=10)
    net.calibrate_(batches, align=4, passes=10)
    assert net.artifact().statistics.grids == (1, 4)
    assert warned(lambda: net.resize_(macs=0.55, align=4)) == []
    net, batches = make()
    net.calibrate_(batches, sizes=[0.5], align=4)
    assert "too far" in warned(lambda: net.resize_(macs=0.8, align=4))[0]


# On the command line


@pytest.fixture(scope="module")
def sparse_file(tmp_path_factory):
    """A network of the digits' recipe, calibrated at a few sizes only."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    path = tmp_path_factory.mktemp("sparse") / "network.safetensors"
    task = recipes.make_task(recipes.find("digits"), None, recipes.default_settings(recipes.find("digits")))
    net = decompose(task.build_model(), task.load_data().test_batch(torch.arange(8))[0])
    net.calibrate_([task.load_data().test_batch(torch.arange(64))[0]], sizes=[1.0, 0.9])
    net.save(path, info={"recipe": "digits", "settings": {}})
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("resize", "--macs", "0.3", "-o", "small.safetensors"),
        ("evaluate", "--sizes", "0.3"),
        ("export", "--macs", "0.3", "-o", "small.pt2"),
        ("export", "--any-size", "-o", "any.safetensors"),
        ("sizes",),
    ],
    ids=" ".join,
)
def test_every_verb_says_where_a_size_is_too_far_from_calibrated_ones(
    sparse_file, arguments, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    verb, *options = arguments
    assert main([verb, str(sparse_file), *options]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"decomposable {verb}: warning: batch normalisation was calibrated for ")
    assert "decomposable calibrate FILE" in lines[0]
