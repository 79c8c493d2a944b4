"""Timing sizes side by side: the entry of a latency profile. No torch: how a size is run is the caller's."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from decomposable_edge.checks import check_count
from decomposable_edge.errors import BudgetError, InvalidArgumentError
from decomposable_edge.machine import check_threads
from decomposable_edge.sizing.interpolation import position
from decomposable_edge.sizing.plans import RankPlan
from decomposable_edge.sizing.profiles import RUNTIMES, Entry, Sample, TimedSize, timed_now
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.rounding import DEFAULT_ALIGN, Align

SIZES = (0.95, 0.85, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1)  # besides the original, as far as the network can be so small
ALIGNMENTS: tuple[Align, ...] = (1, "auto", 4, 8, 16, 32)  # that are tried; those that move ranks least come first
TRIALS = (0.5, 0.25)  # where alignments are tried; of sizes that are given, it is the smallest and the largest
TIE = 1.01  # times that differ by less than this factor are equal: the alignment that moves ranks less is taken
WARM_UP = 2  # calls of every function that do not count: the first ones choose kernels and take memory

Runs = Mapping[str, Callable[[], object]]
Making = Callable[[Mapping[str, RankPlan]], AbstractContextManager[Runs]]
"""Makes of named plans the functions that run them once, and undoes at the end what it has set."""


def sweep(
    selector: RankSelector,
    making: Making,
    sizes: Sequence[float] | None = None,
    *,
    runtime: str,
    batch: int,
    threads: int,
    seconds: float,
    align: int | str | None = DEFAULT_ALIGN,
) -> Entry:
    """Time the original network and several sizes; with ``align="measured"``, find the best alignment first.

    `sizes` are parts of the original or counts (of MACs, of parameters where those are not known), by default `SIZES`.
    An alignment above all ranks is noted as the smallest one that is.
    """
    check_count("batch", batch)
    check_threads(threads)
    if runtime not in RUNTIMES:
        raise InvalidArgumentError.about("runtime", runtime, ", ".join(RUNTIMES))
    trials: list[tuple[Align, float]] = []
    if align == "measured":
        seconds /= 2  # a half for each
        trials = try_alignments(selector, sizes, lambda plans: _times(making, plans, seconds))
        align = fastest(trials)
    chosen = selector.effective_align(align)
    plans = {"the original": selector.full_plan()}
    for size in _possible(selector, sizes, chosen, SIZES):
        plan = selector.of_size(size, align=chosen)
        if plan not in plans.values():  # several budgets may come to one size
            plans[str(size)] = plan
    samples = _times(making, plans, seconds)
    timed = [TimedSize.of(plan, samples[name]) for name, plan in plans.items()]
    return timed_now(runtime=runtime, batch=batch, threads=threads, sizes=timed, align=chosen, trials=trials)


def _times(making: Making, plans: Mapping[str, RankPlan], seconds: float) -> dict[str, Sample]:
    with making(plans) as runs:
        return interleaved(runs, seconds=seconds)


def _possible(
    selector: RankSelector, sizes: Sequence[float] | None, align: Align, usual: Sequence[float]
) -> Sequence[float]:
    """Return the sizes asked for, which have to be possible; or those of the usual ones that are."""
    smallest = selector.smallest_cost(selector.measure, align) / selector.full_cost(selector.measure)
    return [size for size in usual if size >= smallest] if sizes is None else sizes


def try_alignments(
    selector: RankSelector,
    sizes: Sequence[float] | None,
    times: Callable[[Mapping[str, RankPlan]], Mapping[str, Sample]],
) -> list[tuple[Align, float]]:
    """Return alignments, and their times relative to no rounding: the geometric mean over two sizes.

    An alignment counts only where all the sizes are possible with it. What counts is the time for what is used: a
    coarser alignment may leave more of a budget unused, and would else seem faster merely for being smaller.
    """
    wanted = {selector.of_size(size, align=1).ranks: size for size in _possible(selector, sizes, 1, TRIALS)}
    wanted.pop(selector.full_plan().ranks, None)  # where nothing is factored, nothing is rounded
    if not wanted:
        raise InvalidArgumentError("align='measured' needs a size below 1 to try alignments at; got none")
    plans = {align: found for align in ALIGNMENTS if (found := _aligned(selector, list(wanted.values()), align))}
    ordered = sorted(wanted.values(), key=lambda size: position(plans[1][size]))
    chosen = {ordered[0], ordered[-1]}
    keys = [(size, align) for align in plans for size in chosen]
    names = {plans[align][size].ranks: f"{size} aligned to {align}" for size, align in reversed(keys)}
    samples = times({names[plans[align][size].ranks]: plans[align][size] for size, align in keys})

    def per_cost(size: float, align: Align) -> float:
        plan = plans[align][size]
        return samples[names[plan.ranks]].quartiles_ms[1] / position(plan)

    return [
        (align, math.prod(per_cost(size, align) / per_cost(size, 1) for size in chosen) ** (1 / len(chosen)))
        for align in plans
    ]


def _aligned(selector: RankSelector, sizes: Sequence[float], align: Align) -> dict[float, RankPlan] | None:
    """Return the plans of all the sizes with this alignment, if all are possible."""
    try:
        return {size: selector.of_size(size, align=align) for size in sizes}
    except BudgetError:
        return None


def fastest(trials: Sequence[tuple[Align, float]]) -> Align:
    """Return the alignment with the smallest time; of those that are as good as equal, the first.

    >>> fastest([(1, 1.0), (4, 0.9), (8, 0.805), (16, 0.8), (32, 1.2)])
    8
    """
    best = min(time for _, time in trials)
    return next(align for align, time in trials if time <= TIE * best)


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    least: int = 5,
    most: int = 1000,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Sample]:
    """Time every function, all of them once in every round, so that a slow moment of the machine slows all alike.

    Rounds go on until `seconds` have passed, but there are at least `least` and at most `most` of them. The order
    changes from round to round, because a function may leave the caches in a state that suits the next one.

    >>> samples = interleaved({"a": lambda: None, "b": lambda: None}, seconds=0, least=3)
    >>> {name: sample.repetitions for name, sample in samples.items()}
    {'a': 3, 'b': 3}
    """
    if not (0 <= seconds < float("inf") and 1 <= least <= most):
        came, allowed = (seconds, least, most), "seconds from 0, and 1 <= least <= most"
        raise InvalidArgumentError.about("seconds, least, most", came, allowed)
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    end, rounds = clock() + seconds, 0
    while rounds < least or (rounds < most and clock() < end):
        shuffle(order)
        for name in order:
            start = clock()
            runs[name]()
            taken[name].append(clock() - start)
        rounds += 1
    return {name: Sample(tuple(values)) for name, values in taken.items()}
