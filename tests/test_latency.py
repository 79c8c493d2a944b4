import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import decomposable
from decomposable.cost import LayerCost
from decomposable.errors import ArtifactError, BudgetError, DecomposableError, InvalidArgumentError
from decomposable.latency import Entry, LatencyProfile, TimedSize, choose_timed, fingerprint, timed_now
from decomposable.ranks import RankSelector
from decomposable.timing import WARM_UP, Machine, Sample, interleaved

few = settings(deadline=None, derandomize=True, max_examples=80)


def chooser(*, macs=True, shift=0.0, full=60):
    costs = tuple(
        LayerCost(
            name=name,
            full_rank=full,
            dense_macs=full * full * 10,
            macs_per_rank=2 * full * 10,
            dense_params=full * full,
            params_per_rank=2 * full,
        )
        for name in ("a", "b")
    )
    return RankSelector(
        costs=costs,
        scores=(np.linspace(2, 1, full) + shift, np.linspace(3, 0, full)),
        fixed_macs=100 if macs else None,
        fixed_params=10,
        lower=np.array([1, 1]),
        upper=np.array([full, full]),
    )


def timed(size, milliseconds, spread=0.1):
    return TimedSize(
        macs=round(1000 * size),
        macs_fraction=size,
        params=round(100 * size),
        params_fraction=size,
        median_ms=milliseconds,
        low_ms=milliseconds * (1 - spread),
        high_ms=milliseconds * (1 + spread),
        repetitions=9,
    )


def entry(times, runtime="torch", batch=1, threads=2, **more):
    sizes = [timed(size, milliseconds) for size, milliseconds in times.items()]
    return timed_now(runtime=runtime, batch=batch, threads=threads, sizes=sizes, **more)


TIMES = {0.1: 1.0, 0.25: 2.0, 0.5: 4.0, 1.0: 5.0}


def profile(*entries, selector=None):
    return LatencyProfile.of(selector or chooser(), entries or [entry(TIMES)])


# Timing side by side


class Clock:
    """Time that passes only where something is done."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_every_round_runs_each_function_once_in_a_changing_order():
    clock, calls = Clock(), []

    def run(name, seconds):
        calls.append(name)
        clock.now += seconds

    runs = {name: lambda name=name, s=s: run(name, s) for name, s in (("a", 0.1), ("b", 0.2), ("c", 0.3))}
    samples = interleaved(runs, seconds=6, least=2, most=50, clock=clock)
    assert calls[: 3 * WARM_UP] == ["a"] * WARM_UP + ["b"] * WARM_UP + ["c"] * WARM_UP
    rounds = [tuple(calls[i : i + 3]) for i in range(3 * WARM_UP, len(calls), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1
    assert {name: sample.repetitions for name, sample in samples.items()} == dict.fromkeys("abc", len(rounds))
    assert len(rounds) in (10, 11)  # 6 s of 0.6 s a round; sums of floats decide about the last one
    for name, seconds in (("a", 0.1), ("b", 0.2), ("c", 0.3)):
        assert samples[name].quartiles_ms == pytest.approx((1e3 * seconds,) * 3)


@pytest.mark.parametrize(("seconds", "least", "most", "expected"), [(0, 4, 9, 4), (1e9, 4, 9, 9), (0.35, 1, 9, 4)])
def test_rounds_go_on_for_the_time_given_between_least_and_most(seconds, least, most, expected):
    clock = Clock()

    def run():
        clock.now += 0.1

    assert interleaved({"a": run}, seconds=seconds, least=least, most=most, clock=clock)["a"].repetitions == expected


@few
@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=30))
def test_quartiles_are_those_of_numpy(seconds):
    expected = 1e3 * np.percentile(seconds, [25, 50, 75])
    assert Sample(tuple(seconds)).quartiles_ms == pytest.approx(tuple(expected))


@pytest.mark.parametrize("wrong", [{"seconds": -1}, {"seconds": math.nan}, {"least": 0}, {"least": 9, "most": 3}])
def test_wrong_repetitions_are_refused(wrong):
    with pytest.raises(InvalidArgumentError, match="allowed"):
        interleaved({"a": lambda: None}, **{"seconds": 0, **wrong})


def test_what_a_function_raises_comes_through():
    with pytest.raises(ZeroDivisionError):
        interleaved({"a": lambda: 1 / 0}, seconds=0)


# The largest size that holds a time


@pytest.mark.parametrize(
    ("milliseconds", "size"),
    [(1, 0.1), (1.5, 0.175), (2, 0.25), (3, 0.375), (4, 0.5), (4.25, 0.625), (5, 1.0), (5.1, 1.0), (1000, 1.0)],
)
def test_a_time_between_two_sizes_is_interpolated_and_dense_is_the_end(milliseconds, size):
    assert profile().size_for(milliseconds, runtime="torch") == pytest.approx(size, abs=1e-12)


def test_a_size_that_was_measured_slower_than_a_larger_one_is_passed_over():
    """Near full size two factors are often slower than dense: a time that dense holds is dense."""
    times = {0.25: 2.0, 0.5: 4.0, 0.75: 6.0, 1.0: 5.0}
    assert entry(times).size_for(5.0) == 1.0
    assert entry(times).size_for(4.5) == pytest.approx(0.5 + 0.25 * 0.25)


@few
@given(
    times=st.dictionaries(st.integers(1, 50), st.floats(0.1, 9), min_size=1, max_size=8), milliseconds=st.floats(0.1, 9)
)
def test_no_measured_size_above_the_chosen_one_holds_the_time(times, milliseconds):
    measured = entry({size / 50: time for size, time in times.items()})
    if milliseconds < min(times.values()):
        with pytest.raises(BudgetError):
            measured.size_for(milliseconds)
        return
    size = measured.size_for(milliseconds)
    held = max(row.size for row in measured.sizes if row.median_ms <= milliseconds)
    above = [row for row in measured.sizes if row.size > held]
    assert held <= size <= (above[0].size if above else held)
    assert all(row.median_ms > milliseconds for row in above)


def test_a_time_that_cannot_be_held_names_the_smallest_that_can():
    with pytest.raises(BudgetError, match=r"latency_ms=0.5 is too small.*1.000 ms, at 0.1000 .*torch, batch 1, 2 thr"):
        profile().size_for(0.5, runtime="torch")


@pytest.mark.parametrize("milliseconds", [0, -1, math.nan, math.inf, "5", None, True])
def test_a_wrong_time_is_refused(milliseconds):
    with pytest.raises(InvalidArgumentError, match=r"latency_ms=.*allowed: milliseconds above 0"):
        profile().size_for(milliseconds, runtime="torch")


# Which entry


def test_one_entry_of_a_runtime_needs_no_batch_and_threads():
    both = profile(entry(TIMES), entry({0.5: 1.0, 1.0: 3.0}, runtime="onnxruntime", batch=8))
    assert both.size_for(2, runtime="torch") == 0.25
    assert both.size_for(2, runtime="onnxruntime") == pytest.approx(0.75)
    assert both.size_for(2, runtime="onnxruntime", batch=8, threads=2) == pytest.approx(0.75)


def test_several_entries_are_named():
    several = profile(entry(TIMES), entry(TIMES, threads=1), entry(TIMES, batch=32))
    with pytest.raises(InvalidArgumentError, match=r"several entries fit.*batch 1, 1 thread;.*batch 32, 2 threads"):
        profile(*several.entries[::-1]).merged(several).entry(runtime="torch")
    with pytest.raises(InvalidArgumentError, match="several"):
        several.entry(runtime="torch", batch=1)
    assert several.entry(runtime="torch", batch=1, threads=1) == several.entries[1]
    assert several.entry(runtime="torch", batch=32) == several.entries[2]


def test_what_was_not_measured_is_named_with_what_was():
    with pytest.raises(DecomposableError, match=r"onnxruntime, batch 4 was not measured, but torch, batch 1, 2 thr"):
        profile().entry(runtime="onnxruntime", batch=4)
    with pytest.raises(InvalidArgumentError, match="runtime='tf'; allowed: torch, onnxruntime"):
        profile().entry(runtime="tf")


@pytest.mark.parametrize("change", [{"cpu": "an abacus"}, {"cores": 1024}])
def test_another_machine_is_refused_unless_it_is_said_to_be_the_same(change):
    foreign = dataclasses.replace(profile(), machine=dataclasses.replace(Machine.here(), **change))
    with pytest.raises(DecomposableError, match=r"another machine.*decomposable bench.*as_if_here") as caught:
        foreign.size_for(2, runtime="torch")
    assert str(next(iter(change.values()))) in str(caught.value)
    assert foreign.as_if_here().size_for(2, runtime="torch") == 0.25


def test_the_alignment_is_the_one_that_was_found_by_trying():
    assert profile(entry(TIMES, align=8, trials=[(1, 1.0), (8, 0.9)])).alignment(runtime="torch") == 8
    with pytest.raises(DecomposableError, match=r"no alignments were tried.*--align measured"):
        profile(entry(TIMES, align=8)).alignment(runtime="torch")


# Choosing a plan by time


def choose(selector, found, *, latency_ms=None, align=None, threads=2, **size):
    return choose_timed(
        selector, lambda: found, runtime="torch", threads=threads, latency_ms=latency_ms, align=align, **size
    )


def test_a_time_is_a_budget_of_macs():
    selector = chooser()
    assert choose(selector, profile(), latency_ms=3) == selector.choose(macs=0.375)
    assert choose(selector, profile(), latency_ms=9).is_full


def test_without_macs_it_is_a_budget_of_parameters():
    selector = chooser(macs=False)
    rows = [
        dataclasses.replace(timed(size, time), macs=None, macs_fraction=None, params_fraction=size)
        for size, time in TIMES.items()
    ]
    found = profile(timed_now(runtime="torch", batch=1, threads=2, sizes=rows), selector=selector)
    assert choose(selector, found, latency_ms=3) == selector.choose(params=0.375)


def test_a_time_is_for_ranks_rounded_as_they_were_when_it_was_measured():
    selector, found = chooser(), profile(entry(TIMES, align=4, trials=[(1, 1.0), (4, 0.9)]))
    expected = selector.choose(macs=0.375, align=4)
    assert expected != selector.choose(macs=0.375)
    for align in (None, 4, "measured"):
        assert choose(selector, found, latency_ms=3, align=align) == expected
    with pytest.raises(InvalidArgumentError, match=r"latency_ms=3 with align=8: what was measured has align=4"):
        choose(selector, found, latency_ms=3, align=8)


def test_a_measured_alignment_is_for_every_kind_of_size():
    selector, found = chooser(), profile(entry(TIMES, align=4, trials=[(1, 1.0), (4, 0.9)]))
    for size in ({"macs": 0.4}, {"params": 0.4}, {"ratio": 0.4}):
        assert choose(selector, found, align="measured", **size) == selector.choose(**size, align=4)
    with pytest.raises(InvalidArgumentError, match="ranks"):
        choose(selector, found, align="measured", ranks={"a": 3})


def test_of_several_entries_the_one_with_as_many_threads_counts():
    selector = chooser()
    found = profile(entry(TIMES), entry({0.5: 1.0, 1.0: 3.0}, threads=1), selector=selector)
    assert choose(selector, found, latency_ms=3, threads=2) == selector.choose(macs=0.375)
    assert choose(selector, found, latency_ms=3, threads=1).is_full
    with pytest.raises(InvalidArgumentError, match="several"):
        choose(selector, found, latency_ms=3, threads=4)
    only = profile(entry(TIMES), selector=selector)
    assert choose(selector, only, latency_ms=3, threads=4) == selector.choose(macs=0.375)


def test_of_several_batches_the_smallest_counts_unless_one_is_named():
    selector = chooser()
    found = profile(entry({0.5: 20.0, 1.0: 40.0}, batch=32), entry(TIMES), selector=selector)
    assert choose(selector, found, latency_ms=3) == selector.choose(macs=0.375)
    assert choose(selector, found, latency_ms=30, batch=32) == selector.choose(macs=0.75)
    with pytest.raises(DecomposableError, match=r"torch, batch 8.* was not measured"):
        choose(selector, found, latency_ms=30, batch=8)


@pytest.mark.parametrize("size", [{"latency_ms": 3}, {"macs": 0.5, "align": "measured"}])
def test_without_a_profile_it_says_how_to_make_one(size):
    with pytest.raises(InvalidArgumentError, match=r"(latency_ms=3|align='measured'): .*decomposable bench"):
        choose(chooser(), None, **size)


def test_the_profile_is_not_asked_for_where_it_is_not_needed():
    def fail():
        raise AssertionError

    plan = choose_timed(chooser(), fail, runtime="torch", threads=1, latency_ms=None, align=4, macs=0.5)
    assert plan == chooser().choose(macs=0.5, align=4)


def test_a_time_and_a_size_are_too_much():
    with pytest.raises(InvalidArgumentError, match=r"exactly one of .*latency_ms; got macs, ratio and latency_ms"):
        choose(chooser(), profile(), latency_ms=3, macs=0.5, ratio=0.2, params=None)


@pytest.mark.parametrize("other", [{"shift": 0.5}, {"macs": False}, {"full": 61}])
def test_the_profile_of_another_network_is_refused(other):
    with pytest.raises(DecomposableError, match="of another network"):
        choose(chooser(**other), profile(), latency_ms=3)


def test_the_fingerprint_does_not_depend_on_limits_or_on_the_scale_of_scores():
    """A network of which a part was loaded has other limits, and the same sizes."""
    selector = chooser()
    part = dataclasses.replace(selector, upper=np.array([5, 5]))
    scaled = dataclasses.replace(selector, scores=tuple(2 * s for s in selector.scores))
    assert fingerprint(part) == fingerprint(scaled) == fingerprint(selector)


# The file


def test_what_is_saved_is_loaded(tmp_path):
    saved = profile(
        entry(TIMES, align=8, trials=[(1, 1.0), (8, 0.93)]),
        Entry(runtime="onnxruntime", batch=1, threads=1, sizes=(dataclasses.replace(timed(1.0, 2.0), macs=10**15),)),
    )
    path = LatencyProfile.path_beside(tmp_path / "net.safetensors")
    saved.save(path)
    assert path.name == "net.safetensors.latency.json"
    assert set(LatencyProfile.load(path).entries) == set(saved.entries)
    assert LatencyProfile.load_beside(tmp_path / "net.safetensors") == LatencyProfile.load(path)
    assert LatencyProfile.load_beside(tmp_path / "other.safetensors") is None
    assert list(tmp_path.iterdir()) == [path]


def test_saving_keeps_the_entries_of_other_settings(tmp_path):
    path = tmp_path / "p.json"
    profile(entry(TIMES), entry(TIMES, threads=1)).save(path)
    newer = entry({1.0: 7.0}, threads=1)
    profile(newer, entry(TIMES, runtime="onnxruntime")).save(path)
    found = LatencyProfile.load(path)
    assert [e.setting for e in found.entries] == [("onnxruntime", 1, 2), ("torch", 1, 1), ("torch", 1, 2)]
    assert found.entry(runtime="torch", threads=1) == newer


@pytest.mark.parametrize(
    "older",
    [
        profile(entry(TIMES, batch=7), selector=chooser(shift=0.5)),
        dataclasses.replace(profile(entry(TIMES, batch=7)), machine=Machine(cpu="an abacus", cores=1)),
    ],
    ids=["network", "machine"],
)
def test_saving_drops_what_belongs_to_another(older, tmp_path):
    path = tmp_path / "p.json"
    older.save(path)
    profile().save(path)
    assert LatencyProfile.load(path) == dataclasses.replace(profile(), entries=LatencyProfile.load(path).entries)
    assert [e.batch for e in LatencyProfile.load(path).entries] == [1]


def test_a_broken_profile_is_replaced(tmp_path):
    path = tmp_path / "p.json"
    path.write_text("{")
    profile().save(path)
    assert LatencyProfile.load(path).entries[0].sizes == profile().entries[0].sizes


def broken(path, content):
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="not a latency profile") as caught:
        LatencyProfile.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": 2}', b'{"format": true}', b"9" * 5000],
    ids=lambda content: repr(content[:12]),
)
def test_what_is_no_profile_is_refused(content, tmp_path):
    broken(tmp_path / "p.json", content)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "p.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ArtifactError, match="more than"):
        LatencyProfile.load(tmp_path / "p.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in folders")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "p.json")
    with pytest.raises(ArtifactError, match="ordinary"):
        LatencyProfile.load(tmp_path / "p.json")


WRONG = [None, -1, 0, 1.5, True, "x", [], {}, [[]], 1e300, 10**400, float("nan")]


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def test_a_profile_with_any_place_spoilt_is_refused_or_still_sane(tmp_path):
    path = tmp_path / "p.json"
    profile(entry({0.5: 1.0, 1.0: 2.0}, align=8, trials=[(1, 1.0), (8, 0.9)])).save(path)
    content = json.loads(path.read_text())
    refused = 0
    for place in list(places(content))[1:]:
        for wrong in [*WRONG, "absent"]:
            spoilt = copy.deepcopy(content)
            holder = spoilt
            for key in place[:-1]:
                holder = holder[key]
            if wrong == "absent":
                del holder[place[-1]]
            else:
                holder[place[-1]] = wrong
            path.write_text(json.dumps(spoilt))
            try:
                found = LatencyProfile.load(path)
            except ArtifactError as error:
                refused += "\n" not in str(error)
                continue
            for each in found.entries:
                assert all(math.isfinite(t.median_ms) and t.median_ms > 0 for t in each.sizes)
                assert 0 < each.size_for(max(t.median_ms for t in each.sizes)) <= 1
    assert refused > 300


def test_the_same_setting_twice_is_refused(tmp_path):
    path = tmp_path / "p.json"
    profile().save(path)
    content = json.loads(path.read_text())
    broken(path, json.dumps({**content, "entries": content["entries"] * 2}).encode())


def test_profiles_need_no_torch():
    """A device without PyTorch measures and chooses with this code."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['safetensors'] = None\n"
        "import decomposable.latency, decomposable.timing, decomposable.bench.sweep"
    )
    source = str(Path(decomposable.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, check=True)


def test_the_machine_is_the_same_every_time():
    assert Machine.here() == Machine.here()
    assert Machine.here().cores == os.cpu_count()
    assert str(Machine(cpu="abacus", cores=1)) == "abacus, 1 core"
