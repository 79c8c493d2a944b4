"""What `calibrate_` does: chosen sizes as they are asked for, or else a grid as dense as the network needs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from decomposable.checks import is_number
from decomposable.core.tracing import call_with_first, first_entry, on_device_of
from decomposable.errors import InvalidArgumentError
from decomposable.network.calibration.batches import Kept
from decomposable.network.calibration.grid import calibrated_grid
from decomposable.network.calibration.statistics import (
    CalibrationReport,
    Statistics,
    Subject,
    measured,
    measured_exactly,
)
from decomposable.progress import Progress, Report, Tracker
from decomposable.sizing.interpolation import position
from decomposable.sizing.plans import RankPlan
from decomposable.sizing.ranks import RankSelector
from decomposable.sizing.rounding import AUTO_NEEDS_NONE


def checked_plans(
    selector: RankSelector, sizes: Sequence[float] | None, *, align: int | None, passes: float, exact: bool
) -> list[RankPlan] | None:
    """The sizes that were asked for, each of them once; None for a grid. What cannot be asked for is refused."""
    if not (is_number(passes) and 3 <= passes < math.inf):  # a coarse grid takes a few at least
        raise InvalidArgumentError(f"calibrate_: passes={passes!r}; allowed: a number of at least 3")
    if align == "auto":  # type: ignore[comparison-overlap]
        raise InvalidArgumentError(f"calibrate_: align='auto': {AUTO_NEEDS_NONE}")
    if sizes is None:
        if exact:
            raise InvalidArgumentError("calibrate_(exact=True): got no sizes; allowed: with sizes=[...], as it is slow")
        return None
    if not isinstance(sizes, Iterable):
        raise InvalidArgumentError(f"calibrate_: sizes={sizes!r}; allowed: a list of sizes, such as [0.25, 0.5]")
    plans = [selector.of_size(size, align=align) for size in sizes]
    if not plans:
        raise InvalidArgumentError("calibrate_: sizes is empty; allowed: at least one size")
    return list({plan.ranks: plan for plan in plans}.values())


def calibrated(
    subject: Subject,
    selector: RankSelector,
    plans: Sequence[RankPlan] | None,
    loader: Iterable[Any],
    *,
    align: int,
    passes: float,
    exact: bool,
    report: Report,
) -> tuple[Statistics, CalibrationReport]:
    """The statistics of these sizes, or of a grid, and what they cost."""
    start = time.perf_counter()
    forward = subject.forward
    # Of other ways to run a network nobody knows what they use of a batch.
    batches = Kept(loader, first_entry if forward is call_with_first else lambda batch: batch)
    subject = replace(subject, forward=lambda net, batch: forward(net, on_device_of(net, batch)))
    spent, is_settled = None, True
    if plans is None:
        statistics, spent, is_settled = calibrated_grid(
            subject, selector, batches, align=align, passes=float(passes), report=report
        )
    else:
        if exact:
            statistics = measured_exactly(subject, plans, batches.again(), report)
        else:
            spent = sum(map(position, plans))
            statistics = measured(subject, plans, batches, _counter(batches, spent, report))
        statistics = replace(statistics, has_explicit_full=any(plan.is_full for plan in plans))
    return statistics, CalibrationReport(
        sizes=len(statistics.plans),
        batches=batches.count,
        seconds=time.perf_counter() - start,
        bytes=statistics.bytes,
        passes=spent,
        is_settled=is_settled,
    )


def _counter(batches: Kept, passes: float, report: Report) -> Callable[[RankPlan], None]:
    """Tells how far one pass over the loader is, where the loader says how many batches there will be."""
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
