import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import decomposable
from decomposable_edge import locks
from decomposable_edge.errors import ArtifactError, BudgetError, DecomposableError
from decomposable_edge.machine import Machine, check_threads
from decomposable_edge.sizing.cost import LayerCost
from decomposable_edge.sizing.latency import Entry, LatencyProfile, TimedSize, choose_timed, fingerprint, timed_now
from decomposable_edge.sizing.plans import SizeRequest
from decomposable_edge.sizing.profiles import Sample
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.sweep import WARM_UP, interleaved
from refusals import Saying, refused

few = settings(deadline=None, derandomize=True, max_examples=80)


def chosen(selector, **size):
    return selector.plan_for(SizeRequest(**size))


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
    with refused(allowed="seconds from 0, and 1 <= least <= most"):
        interleaved({"a": lambda: None}, **{"seconds": 0, **wrong})


def test_what_a_function_raises_comes_through():
    with pytest.raises(ZeroDivisionError):
        interleaved({"a": lambda: 1 / 0}, seconds=0)


# The largest size that holds a time


@pytest.mark.parametrize(
    ("milliseconds", "size"),
    [(1, 0.1), (1.5, 0.175), (2, 0.25), (3, 0.375), (4, 0.5), (4.99, 0.5), (5, 1.0), (5.1, 1.0), (1000, 1.0)],
)
def test_a_time_between_two_sizes_is_interpolated_but_not_towards_the_original(milliseconds, size):
    assert profile().size_for(milliseconds, runtime="torch") == pytest.approx(size, abs=1e-12)


def test_a_size_that_was_measured_slower_than_a_larger_one_is_passed_over():
    """Near full size two factors are often slower than dense: a time that dense holds is dense."""
    times = {0.25: 2.0, 0.5: 4.0, 0.75: 6.0, 1.0: 5.0}
    assert entry(times).size_for(5.0) == 1.0
    assert entry(times).size_for(4.5) == pytest.approx(0.5 + 0.25 * 0.25)


def test_no_size_is_taken_between_the_largest_factored_one_and_the_original():
    """As it was measured: 0.93 takes 2.16 ms, more than dense, so 2.0 ms must not lead to 0.96."""
    times = {0.75: 1.79, 1.0: 2.01}
    assert [entry(times).size_for(t) for t in (1.79, 1.9, 2.0, 2.01, 3)] == [0.75, 0.75, 0.75, 1.0, 1.0]
    finer = {0.75: 1.79, 0.85: 1.99, 0.93: 2.16, 1.0: 2.01}
    assert entry(finer).size_for(1.89) == pytest.approx(0.8)
    assert entry(finer).size_for(2.005) == pytest.approx(0.85 + 0.08 * 0.015 / 0.17)
    assert entry(finer).size_for(2.1) == 1.0


def test_without_the_original_the_largest_size_is_the_end():
    assert entry({0.5: 1.0, 0.75: 2.0}).size_for(1.5) == pytest.approx(0.625)
    assert entry({0.5: 1.0, 0.75: 2.0}).size_for(9) == 0.75


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
    with refused("latency_ms", 0.5, Saying("^1.000 ms, at 0.1000 .*torch, batch 1, 2 threads"), kind=BudgetError):
        profile().size_for(0.5, runtime="torch")


@pytest.mark.parametrize("milliseconds", [0, -1, math.nan, math.inf, "5", None, True])
def test_a_wrong_time_is_refused(milliseconds):
    with refused("latency_ms", allowed="milliseconds above 0") as caught:
        profile().size_for(milliseconds, runtime="torch")
    assert caught.value.came is milliseconds


# Which entry


def test_one_entry_of_a_runtime_needs_no_batch_and_threads():
    both = profile(entry(TIMES), entry({0.5: 1.0, 1.0: 3.0}, runtime="onnxruntime", batch=8))
    assert both.size_for(2, runtime="torch") == 0.25
    assert both.size_for(2, runtime="onnxruntime") == 0.5
    assert both.size_for(2, runtime="onnxruntime", batch=8, threads=2) == 0.5


def test_several_entries_are_named():
    several = profile(entry(TIMES, threads=1), entry(TIMES), entry(TIMES, batch=32))
    with refused("latency", list(several.entries), Saying("batch= and threads=")) as caught:
        several.entry(runtime="torch")
    assert all(str(each) in str(caught.value) for each in several.entries)
    with refused("latency", list(several.entries[:2])):
        several.entry(runtime="torch", batch=1)
    assert several.entry(runtime="torch", batch=1, threads=1) == several.entries[0]
    assert several.entry(runtime="torch", batch=32) == several.entries[2]


def test_what_was_not_measured_is_named_with_what_was():
    with refused("latency", "onnxruntime, batch 4", kind=DecomposableError) as caught:
        profile().entry(runtime="onnxruntime", batch=4)
    assert str(profile().entries[0]) in str(caught.value)
    with refused("runtime", "tf", "torch, onnxruntime"):
        profile().entry(runtime="tf")


@pytest.mark.parametrize("change", [{"cpu": "an abacus"}, {"cores": 1024}])
def test_another_machine_is_refused_unless_it_is_said_to_be_the_same(change):
    foreign = dataclasses.replace(profile(), machine=dataclasses.replace(Machine.here(), **change))
    ways = Saying("decomposable bench.*as_if_here")
    with refused("latency", foreign.machine, ways, kind=DecomposableError) as caught:
        foreign.size_for(2, runtime="torch")
    assert str(next(iter(change.values()))) in str(caught.value)
    assert foreign.as_if_here().size_for(2, runtime="torch") == 0.25


def test_the_alignment_is_the_one_that_was_found_by_trying():
    assert profile(entry(TIMES, align=8, trials=[(1, 1.0), (8, 0.9)])).alignment(runtime="torch") == 8
    with refused("align", "measured", Saying("--align measured$"), kind=DecomposableError):
        profile(entry(TIMES, align=8)).alignment(runtime="torch")


# Choosing a plan by time


def choose(selector, found, *, latency_ms=None, align=None, threads=2, **size):
    request = SizeRequest(latency_ms=latency_ms, align=align, **size)
    return choose_timed(selector, lambda: found, request, runtime="torch", threads=threads)


def test_a_time_is_a_budget_of_macs():
    selector = chooser()
    assert choose(selector, profile(), latency_ms=3) == chosen(selector, macs=0.375)
    assert choose(selector, profile(), latency_ms=9).is_full


def test_without_macs_it_is_a_budget_of_parameters():
    selector = chooser(macs=False)
    rows = [
        dataclasses.replace(timed(size, time), macs=None, macs_fraction=None, params_fraction=size)
        for size, time in TIMES.items()
    ]
    found = profile(timed_now(runtime="torch", batch=1, threads=2, sizes=rows), selector=selector)
    assert choose(selector, found, latency_ms=3) == chosen(selector, params=0.375)


def test_a_time_is_for_ranks_rounded_as_they_were_when_it_was_measured():
    selector, found = chooser(), profile(entry(TIMES, align=4, trials=[(1, 1.0), (4, 0.9)]))
    expected = chosen(selector, macs=0.375, align=4)
    assert expected != chosen(selector, macs=0.375)
    for align in (None, 4, "measured"):
        assert choose(selector, found, latency_ms=3, align=align) == expected
    with refused("align", 8, "4"):
        choose(selector, found, latency_ms=3, align=8)


def test_auto_takes_a_time_as_it_was_measured():
    """It is the default on a device, where an older profile may have been measured with any alignment."""
    selector = chooser()
    for align in (1, 4, "auto"):
        plan = choose(selector, profile(entry(TIMES, align=align)), latency_ms=3, align="auto")
        assert (plan, plan.align) == (chosen(selector, macs=0.375, align=align), align)
    found = profile(entry(TIMES, align="auto"))
    assert choose(selector, found, latency_ms=3) == chosen(selector, macs=0.375, align="auto")
    with refused("align", 8, "auto"):
        choose(selector, found, latency_ms=3, align=8)


def test_auto_may_be_what_was_found_to_be_the_fastest():
    selector, found = chooser(), profile(entry(TIMES, align="auto", trials=[(1, 1.0), ("auto", 0.8), (16, 0.81)]))
    plan = choose(selector, found, align="measured", macs=0.8)
    assert (plan, plan.align) == (chosen(selector, macs=0.8, align="auto"), "auto")


def test_a_measured_alignment_is_for_every_kind_of_size():
    selector, found = chooser(), profile(entry(TIMES, align=4, trials=[(1, 1.0), (4, 0.9)]))
    for size in ({"macs": 0.4}, {"params": 0.4}, {"ratio": 0.4}):
        assert choose(selector, found, align="measured", **size) == chosen(selector, **size, align=4)
    with refused("align", 4, "one of align and ranks"):
        choose(selector, found, align="measured", ranks={"a": 3})


def test_an_alignment_above_all_ranks_is_the_one_that_was_measured():
    """The ranks are 60: 61 and everything above it round none of them."""
    selector, found = chooser(), profile(entry(TIMES, align=61))
    assert [selector.effective_align(align) for align in (1, 60, 61, 62, 10**30)] == [1, 60, 61, 61, 61]
    for align in (61, 62, 10**30):
        assert choose(selector, found, latency_ms=3, align=align) == selector.plan_for(
            SizeRequest(macs=0.375, align=align)
        )
    with refused("align", 60, "61"):
        choose(selector, found, latency_ms=3, align=60)
    for align in (0, "best", 1.5):
        with refused("align", align, Saying("^an int of at least 1")):
            choose(selector, found, latency_ms=3, align=align)


def test_only_times_with_as_many_threads_count():
    selector = chooser()
    found = profile(entry(TIMES), entry({0.5: 1.0, 1.0: 3.0}, threads=1), selector=selector)
    assert choose(selector, found, latency_ms=3, threads=2) == chosen(selector, macs=0.375)
    assert choose(selector, found, latency_ms=3, threads=1).is_full
    only = profile(entry(TIMES, align=4, trials=[(1, 1.0), (4, 0.9)]), selector=selector)
    for size in ({"latency_ms": 3}, {"latency_ms": 3, "batch": 1}, {"macs": 0.5, "align": "measured"}):
        ways = Saying("decomposable bench.* --threads 4")
        with refused("latency", Saying("^torch(, batch 1)?, threads 4$"), ways, kind=DecomposableError) as caught:
            choose(selector, only, threads=4, **size)
        assert "torch, batch 1, 2 threads" in str(caught.value)


def test_the_batch_is_the_smallest_of_those_with_as_many_threads():
    selector = chooser()
    found = profile(entry(TIMES, threads=1), entry(TIMES, batch=8), entry({0.5: 9.0, 1.0: 40.0}, batch=32))
    assert choose(selector, found, latency_ms=3, threads=2) == chosen(selector, macs=0.375)


def test_of_several_batches_the_smallest_counts_unless_one_is_named():
    selector = chooser()
    found = profile(entry({0.5: 20.0, 1.0: 40.0}, batch=32), entry(TIMES), selector=selector)
    assert choose(selector, found, latency_ms=3) == chosen(selector, macs=0.375)
    assert choose(selector, found, latency_ms=30, batch=32) == chosen(selector, macs=0.5)
    with refused("latency", Saying("^torch, batch 8"), kind=DecomposableError):
        choose(selector, found, latency_ms=30, batch=8)


@pytest.mark.parametrize("size", [{"latency_ms": 3}, {"macs": 0.5, "align": "measured"}])
def test_without_a_profile_it_says_how_to_make_one(size):
    option = "align" if "align" in size else "latency_ms"
    with refused(option, size[option], Saying("decomposable bench")):
        choose(chooser(), None, **size)


def test_the_profile_is_not_asked_for_where_it_is_not_needed():
    def fail():
        raise AssertionError

    plan = choose_timed(chooser(), fail, SizeRequest(align=4, macs=0.5), runtime="torch", threads=1)
    assert plan == chosen(chooser(), macs=0.5, align=4)


def test_a_time_and_a_size_are_too_much():
    with refused("size", "macs, ratio and latency_ms", Saying("^exactly one of .*latency_ms$")):
        choose(chooser(), profile(), latency_ms=3, macs=0.5, ratio=0.2, params=None)


@pytest.mark.parametrize("other", [{"shift": 0.5}, {"macs": False}, {"full": 61}])
def test_the_profile_of_another_network_is_refused(other):
    with refused("latency", "another network", kind=DecomposableError):
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


def test_auto_is_stored_and_profiles_of_numbers_alone_are_read(tmp_path):
    path = tmp_path / "p.json"
    for align, trials in (("auto", [(1, 1.0), ("auto", 0.8)]), (16, [(1, 1.0), (16, 0.8)])):
        found = profile(entry(TIMES, align=align, trials=trials))
        found.save(path)
        assert LatencyProfile.load(path) == found
        assert json.loads(path.read_text())["format"] == 1


def test_saving_keeps_the_entries_of_other_settings(tmp_path):
    path = tmp_path / "p.json"
    profile(entry(TIMES), entry(TIMES, threads=1)).save(path)
    newer = entry({1.0: 7.0}, threads=1)
    profile(newer, entry(TIMES, runtime="onnxruntime")).save(path)
    found = LatencyProfile.load(path)
    assert [e.setting for e in found.entries] == [("onnxruntime", 1, 2), ("torch", 1, 1), ("torch", 1, 2)]
    assert found.entry(runtime="torch", threads=1) == newer


def test_saving_drops_what_belongs_to_another_network(tmp_path):
    path = tmp_path / "p.json"
    profile(entry(TIMES, batch=7), selector=chooser(shift=0.5)).save(path)
    newer = profile()
    newer.save(path)
    assert LatencyProfile.load(path) == newer


ABACUS, LOOM = Machine(cpu="an abacus", cores=1), Machine(cpu="a loom", cores=1)


def elsewhere(machine, when, **more):
    return LatencyProfile(
        network=profile().network, machine=machine, entries=(dataclasses.replace(entry(TIMES, **more), measured=when),)
    )


def test_a_file_keeps_the_entries_of_several_machines(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    abacus, loom, here = elsewhere(ABACUS, "2026-01-02"), elsewhere(LOOM, "2026-01-01", batch=4), profile()
    abacus.save(path)
    loom.save(path)
    assert LatencyProfile.load(path) == abacus  # only others: the one that was measured last, which says so when used
    with refused("latency", Saying("^an abacus, 1 core$"), kind=DecomposableError):
        LatencyProfile.load(path).size_for(3, runtime="torch")
    here.save(path)
    elsewhere(ABACUS, "2026-01-03", batch=2).save(path)
    assert LatencyProfile.load(path) == here
    for machine, batches in ((ABACUS, [1, 2]), (LOOM, [4])):
        monkeypatch.setattr(Machine, "here", classmethod(lambda cls, machine=machine: machine))
        found = LatencyProfile.load(path)
        assert (found.machine, [e.batch for e in found.entries]) == (machine, batches)
        assert found.size_for(3, runtime="torch", batch=batches[0]) == pytest.approx(0.375)


OTHERS = {"text": b"my thesis", "nothing": b"", "half": b"{", "newer": b'{"format": 2, "machines": []}', "other": b"[]"}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
def test_a_file_that_is_no_profile_is_never_replaced(content, tmp_path):
    path = tmp_path / "p.json"
    path.write_bytes(content)
    for refuse in (profile().save, LatencyProfile.check_place):
        with refused(str(path), allowed=Saying("^a profile, or a new file")):
            refuse(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


DAMAGED = {name: content for name, content in OTHERS.items() if name != "newer"}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_corrupt_latency_profile_can_be_replaced_by_measuring_again(content, tmp_path):
    path = LatencyProfile.path_beside(tmp_path / "net.safetensors")
    path.write_bytes(content)
    reason = Saying("^not a latency profile .*decomposable bench FILE.*which replaces it")
    with refused(kind=ArtifactError, path=path, reason=reason):
        LatencyProfile.load(path)
    assert LatencyProfile.check_place(path) is None
    assert path.read_bytes() == content
    with pytest.warns(UserWarning, match=r"net\.safetensors\.latency\.json: it was damaged \(.*new measurement alone"):
        profile().save(path)
    assert LatencyProfile.load(path) == profile()
    assert list(tmp_path.iterdir()) == [path]


def test_a_profile_of_a_later_version_is_not_damaged_and_not_replaced(tmp_path):
    path = LatencyProfile.path_beside(tmp_path / "net.safetensors")
    path.write_bytes(OTHERS["newer"])
    for refuse in (profile().save, LatencyProfile.check_place):
        with refused(str(path), Saying("version 2.* 1$")):
            refuse(path)
    assert path.read_bytes() == OTHERS["newer"]


def test_a_folder_and_a_place_in_no_folder_are_refused(tmp_path):
    for refuse in (profile().save, LatencyProfile.check_place):
        with refused(str(tmp_path), "a folder", "the name of a file"):
            refuse(tmp_path)
        with refused(str(tmp_path / "none" / "p.json"), str(tmp_path / "none"), "one that exists"):
            refuse(tmp_path / "none" / "p.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"align": 10**23}, {"batch": 0}, {"threads": 1 << 60}, {"measured": None}])
def test_what_could_not_be_read_again_is_not_written(wrong, tmp_path):
    path = tmp_path / "p.json"
    profile().save(path)
    before = path.read_bytes()
    with refused(str(path), Saying(f"^'{next(iter(wrong))}' of")):
        profile(dataclasses.replace(entry(TIMES), **wrong)).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_who_saves_waits_for_who_is_saving(tmp_path):
    path = tmp_path / "p.json"
    savers = [threading.Thread(target=profile(entry(TIMES, batch=n)).save, args=(path,)) for n in (1, 2, 3)]
    with locks.holding(tmp_path / ".p.json.lock"):
        for saver in savers:
            saver.start()
        savers[0].join(0.1)
        assert all(saver.is_alive() for saver in savers)
        assert not path.exists()
    for saver in savers:
        saver.join()
    assert [e.batch for e in LatencyProfile.load(path).entries] == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


SAVER = """
    import sys
    path, locking, start = sys.argv[1:]
    if locking == "without":
        sys.modules["filelock"] = None  # as on a device that has numpy alone
    from decomposable_edge.sizing import latency
    from decomposable_edge.sizing.profiles import Entry, TimedSize
    from decomposable_edge.machine import Machine
    ones = dict.fromkeys(("params_fraction", "median_ms", "low_ms", "high_ms"), 1.0)
    size = TimedSize(macs=None, macs_fraction=None, params=1, repetitions=1, **ones)
    for n in range(int(start), int(start) + 15):
        entry = Entry(runtime="torch", batch=n, threads=1, sizes=(size,))
        latency.LatencyProfile(network="n", machine=Machine.here(), entries=(entry,)).save(path)
"""


def saved_at_once(path, locking):
    """Three processes save 15 entries each; the batches that the file has then come back."""
    source = str(Path(decomposable.__file__).parents[1])
    command = [sys.executable, "-c", textwrap.dedent(SAVER), str(path), locking]
    savers = [subprocess.Popen([*command, str(n)], env={"PYTHONPATH": source}) for n in (1, 101, 201)]
    assert [saver.wait() for saver in savers] == [0, 0, 0]
    assert list(path.parent.iterdir()) == [path]
    return [e.batch for e in LatencyProfile.load(path).entries]


def test_processes_that_save_at_once_lose_nothing(tmp_path):
    assert saved_at_once(tmp_path / "p.json", "filelock") == [n + i for n in (1, 101, 201) for i in range(15)]


def test_without_filelock_the_file_is_whole_and_has_what_was_saved_last(tmp_path):
    assert {15, 115, 215} & set(saved_at_once(tmp_path / "p.json", "without"))


def test_a_lock_of_a_process_that_was_killed_is_no_hindrance(tmp_path):
    (tmp_path / ".p.json.lock").touch()
    profile().save(tmp_path / "p.json")
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def broken(path, content):
    path.write_bytes(content)
    with refused(kind=ArtifactError, path=path, reason=Saying("^not a latency profile")):
        LatencyProfile.load(path)


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
    with refused(kind=ArtifactError, path=tmp_path / "p.json", reason=Saying("more than")):
        LatencyProfile.load(tmp_path / "p.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in folders")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "p.json")
    with refused(kind=ArtifactError, path=tmp_path / "p.json", reason=Saying("ordinary")):
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
    profile(entry({0.5: 1.0, 1.0: 2.0}, align=8, trials=[(1, 1.0), ("auto", 0.9)])).save(path)
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
    [machine] = content["machines"]
    twice = {**machine, "entries": machine["entries"] * 2}
    broken(path, json.dumps({**content, "machines": [twice]}).encode())
    broken(path, json.dumps({**content, "machines": [machine, {**machine, "entries": []}]}).encode())
    broken(path, json.dumps({**content, "machines": []}).encode())


def test_profiles_need_no_torch():
    """A device without PyTorch measures and chooses with this code."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['safetensors'] = None\n"
        "import decomposable_edge.sizing.latency, decomposable_edge.sizing.sweep"
    )
    source = str(Path(decomposable.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, check=True)


def test_the_machine_is_the_same_every_time():
    assert Machine.here() == Machine.here()
    assert Machine.here().cores == os.cpu_count()
    assert str(Machine(cpu="abacus", cores=1)) == "abacus, 1 core"


def test_threads_are_at_most_four_for_each_core():
    most = 4 * os.cpu_count()
    assert [check_threads(n) for n in (1, most, np.int64(2))] == [1, most, 2]
    for wrong in (0, -1, most + 1, 100_000, 10**400, 1.0, "2", None, True):
        with refused("threads", allowed=Saying(f"^an int from 1 to {most}, ")) as caught:
            check_threads(wrong)
        assert caught.value.came is wrong
        assert len(str(caught.value)) < 150
