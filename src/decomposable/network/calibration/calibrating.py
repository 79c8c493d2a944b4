"""What `calibrate_` does: chosen sizes as they are asked for, or else a grid as dense as the network needs."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from decomposable.core.tracing import on_device_of
from decomposable.network.calibration.batches import Kept, seen_by
from decomposable.network.calibration.grid import calibrated_grid
from decomposable.network.calibration.statistics import (
    CalibrationReport,
    CalibrationTarget,
    Statistics,
    as_statistics,
    measured,
    measured_exactly,
)
from decomposable.progress import InTurn, Progress, Report, Tracker
from decomposable_edge.checks import is_number
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.interpolation import position
from decomposable_edge.sizing.plans import RankPlan
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.rounding import DEFAULT_ALIGN, Align, calibrated_as

FEWEST_PASSES = 3
"""What a coarse grid takes at least."""


def checked_plans(
    selector: RankSelector, sizes: Sequence[float] | None, *, align: Align, passes: float, exact: bool
) -> list[RankPlan] | None:
    """Return the sizes that were asked for, each of them once; None for a grid. Refuse what cannot be asked for."""
    if not (is_number(passes) and FEWEST_PASSES <= passes < math.inf):
        raise InvalidArgumentError.about("passes", passes, "a number of at least 3")
    if sizes is None:
        if exact:
            raise InvalidArgumentError.about("exact", True, "with sizes=[...], as it is slow")
        return None
    if not isinstance(sizes, Iterable):
        raise InvalidArgumentError.about("sizes", sizes, "a list of sizes, such as [0.25, 0.5]")
    plans = [selector.of_size(size, align=align) for size in sizes]
    if not plans:
        raise InvalidArgumentError.about("sizes", [], "at least one size")
    return list({plan.ranks: plan for plan in plans}.values())


def calibrated(
    subject: CalibrationTarget,
    selector: RankSelector,
    plans: Sequence[RankPlan] | None,
    loader: Iterable[Any],
    *,
    align: Align,
    passes: float,
    exact: bool,
    report: Report,
) -> tuple[Statistics, CalibrationReport]:
    """Return the statistics of these sizes, or of a grid, and what they cost."""
    start = time.perf_counter()
    forward = subject.forward
    batches = Kept(loader, seen_by(forward))
    subject = replace(subject, forward=lambda net, batch: forward(net, on_device_of(net, batch)))
    spent, is_settled = None, True
    if plans is None:
        statistics, spent, is_settled = _grids(subject, selector, batches, align, float(passes), report)
    elif exact:
        rows = measured_exactly(subject, plans, batches.again(), report)
        statistics = as_statistics(subject, plans, rows)
    else:
        spent = sum(map(position, plans))
        statistics = as_statistics(subject, plans, measured(subject, plans, batches, _counter(batches, spent, report)))
    return statistics, CalibrationReport(
        sizes=len(statistics.plans),
        batches=batches.count,
        seconds=time.perf_counter() - start,
        bytes=statistics.bytes,
        passes=spent,
        is_settled=is_settled,
    )


def _grids(
    subject: CalibrationTarget, selector: RankSelector, batches: Kept, align: Align, passes: float, report: Report
) -> tuple[Statistics, float, bool]:
    """Return a grid of the sizes that there are, or of each order where budgets of parameters have their own.

    What lies on one of the two grids is not near what lies on the other.
    """
    parts: list[tuple[Statistics, float, bool]] = []
    in_turn = InTurn(report, count=len(selector.measures))
    share = max(FEWEST_PASSES, passes / len(selector.measures))
    for measure in selector.measures:
        seen = batches.again_from_start() if parts else batches
        parts.append(
            calibrated_grid(subject, selector, seen, measure=measure, align=align, passes=share, report=in_turn)
        )
        in_turn.next()
    grids, spent, are_settled = zip(*parts, strict=True)
    return reduce(Statistics.merged, grids), sum(spent), all(are_settled)


def recalibrated(
    subject: CalibrationTarget,
    selector: RankSelector,
    older: Statistics | None,
    loader: Iterable[Any],
    *,
    passes: float,
    report: Report,
) -> tuple[Statistics, CalibrationReport]:
    """Return statistics anew, after the network has changed at all sizes but the largest that it has.

    The largest keeps its own. What was a grid becomes one, and so does what was not calibrated; chosen sizes are
    measured as they were chosen. The loader is gone through for each of these.
    """
    full: list[int] = []
    ways: list[tuple[Align, list[RankPlan] | None]] = [
        (_of_grid(align), None) for align in (older.grids if older else ())
    ]
    if older is not None:
        most = selector.most_ranks
        there = [i for i, plan in enumerate(older.plans) if (selector.as_array(plan.ranks) <= most).all()]
        full = [i for i in there if older.plans[i].is_full]
        chosen = [older.plans[i] for i in there if i not in full and not _is_on_a_grid(older.plans[i], selector, older)]
        if chosen and set(older.alignments) != set(older.grids):
            ways.append((DEFAULT_ALIGN, chosen))
    made = [
        calibrated(subject, selector, plans, loader, align=align, passes=passes, exact=False, report=report)
        for align, plans in ways or [(DEFAULT_ALIGN, None)]
    ]
    statistics = reduce(Statistics.merged, (each for each, _ in made))
    if older is not None:
        statistics = statistics.merged(older.of_rows(full)) if full else statistics
        largest = selector.full_plan()
        if not largest.is_full and (row := older.at(largest)) is not None:
            statistics = statistics.merged(as_statistics(subject, [largest], [row]))
        statistics = replace(statistics, alignments=tuple(sorted({*statistics.alignments, *older.alignments})))
    reports = [each for _, each in made]
    return statistics, CalibrationReport(
        sizes=len(statistics.plans),
        batches=reports[0].batches,
        seconds=sum(each.seconds for each in reports),
        bytes=statistics.bytes,
        passes=sum(each.passes or 0.0 for each in reports),
        is_settled=all(each.is_settled for each in reports),
    )


def _is_on_a_grid(plan: RankPlan, selector: RankSelector, older: Statistics) -> bool:
    """Return whether a size is one of those that a grid is made of, which is made anew as a whole."""
    aligns = dict.fromkeys(each for align in older.grids for each in (align, _of_grid(align)))
    for measure, align in itertools.product(selector.measures, aligns):
        cost = plan.macs if measure == "macs" else plan.params
        assert cost is not None
        is_possible = cost >= selector.smallest_cost(measure, align)
        if is_possible and selector.of_size(cost, measure, align=align).ranks == plan.ranks:
            return True
    return False


def _of_grid(align: int) -> Align:
    """Return how the ranks of a grid are rounded: what is noted as 1 is a grid of the default, too."""
    return DEFAULT_ALIGN if align == calibrated_as(DEFAULT_ALIGN) else align


def _counter(batches: Kept, passes: float, report: Report) -> Callable[[RankPlan], None]:
    """Return what tells how far one pass over the loader is, where the loader says how many batches there will be."""
    total = batches.expected
    tracker = Tracker(report, "calibrating", total=total, unit="batches")
    ran = 0.0

    def count(plan: RankPlan) -> None:
        nonlocal ran
        ran += position(plan) / passes
        if total:
            tracker.update(round(ran, 2))
        else:
            report(Progress("calibrating", f"batch {batches.count}"))

    return count
