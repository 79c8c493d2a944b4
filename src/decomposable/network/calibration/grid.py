"""A grid of calibrated sizes as dense as *this* network needs, found without labels.

    all sizes that there are        ·······································································▶ larger
    coarse, on all batches          │              │              │              │              │
    refined, on a part of them      │              │   ×   ×   ×  │      ×       │              │

Between two neighbours a size is measured, and the network run with these statistics and with those that interpolation
gives. Where the outputs differ, both halves are looked at again; where they do not, they are left as they are. The
largest differences go first, until there are none or the effort is spent.

A refined size takes what interpolation gives on all batches, corrected by what measuring changes on the part: its
neighbours saw the same part, so that what is special about those images cancels out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from decomposable.network.calibration.batches import Kept, tensors_in
from decomposable.network.calibration.statistics import CalibrationTarget, Row, Statistics, as_statistics, measured
from decomposable.progress import Report, Tracker
from decomposable_edge.sizing.interpolation import position
from decomposable_edge.sizing.plans import RankPlan
from decomposable_edge.sizing.ranks import Ints, Measure, RankSelector
from decomposable_edge.sizing.rounding import Align, calibrated_as

PASSES = 60.0
"""How many passes of the full network a grid may cost, unless something else is asked for."""

_COARSE = (1.5, 2.0, 4.0, math.inf)  # how far apart sizes of the coarse grid are; the first that the effort allows
_PART = 0.2  # of the batches, that refined sizes are measured on
_TOLERANCE = 0.045  # of the outputs' spread: what interpolation may change
_COMPARED = 16  # samples that outputs are compared on

# How many sizes lie between two whose middle was x tolerances off: x (1.4 + 0.05 x), as on a ResNet-20. The factor is a
# little too large, so that the time left falls faster than time passes.
_PER_TOLERANCE, _GROWTH = 1.4, 0.05
_UNKNOWN = 12.0  # tolerances, as long as no size between the two was measured


@torch.no_grad()
def calibrated_grid(
    subject: CalibrationTarget,
    selector: RankSelector,
    batches: Kept,
    *,
    measure: Measure,
    align: Align,
    passes: float,
    report: Report,
) -> tuple[Statistics, float, bool]:
    """Return statistics from the smallest size to the largest one by a measure, for so many passes at most.

    With them comes how many passes it took, and whether the grid is as dense as it has to be.
    """
    sizes = _Sizes(selector, measure, align)
    effort = _Effort(batches, passes, report, sizes.noun)
    grid = _Grid.coarse(subject, sizes, batches, effort, passes)
    is_allowed = True
    while grid.gaps and is_allowed:
        effort.expect(gap.runs(sizes.positions, grid.length + 2 * grid.share) for gap in grid.gaps)
        is_allowed = grid.refine(heapq.heappop(grid.gaps))
    points = grid.points.values()
    found = as_statistics(subject, [point.plan for point in points], [point.whole for point in points])
    return replace(found, has_explicit_full=False, grids=(calibrated_as(align),)), effort.spent, is_allowed


class _Sizes:
    """All sizes by a measure, smallest first."""

    def __init__(self, selector: RankSelector, measure: Measure, align: Align) -> None:
        self._selector, self._measure, self._align = selector, measure, align
        self.costs, self.total = selector.all_costs(align, measure), selector.full_cost(measure)
        self.positions = self.costs / self.total

    @property
    def noun(self) -> str:
        """Return what the sizes are called, if there is another list of sizes too."""
        by = "MACs" if self._measure == "macs" else "parameters"
        return "sizes" if len(self._selector.measures) == 1 else f"sizes by {by}"

    def plan(self, place: int) -> RankPlan:
        return self._selector.of_size(int(self.costs[place]), self._measure, align=self._align)


class _Runs(NamedTuple):
    """So many sizes that cost about so much of the full network's MACs, each run on so many batches."""

    sizes: float
    position: float
    batches: float


class _Effort:
    """Counts what has run, in passes of the full network over the loader, and tells how far that is.

    How many sizes a grid needs turns out while it is made: what is told is what one may expect.
    """

    def __init__(self, batches: Kept, passes: float, report: Report, noun: str = "sizes") -> None:
        self._batches, self._passes, self._noun = batches, passes, noun
        self._tracker = Tracker(report, "calibrating", total=1.0)
        self._spent = self._worked = 0.0  # in passes over one batch, and in time
        self._total_work, self._total_sizes = 1.0, 0.0  # as is expected
        self.weight = 1.0  # of what is run: a whole batch, or a part of one
        self.sizes = 0  # that are measured

    @property
    def spent(self) -> float:
        """Return the work that was done, in passes over the loader."""
        return self._spent / max(1, self._batches.expected)

    def expect(self, to_come: Iterable[_Runs]) -> None:
        """Note what is still to be run, as far as one knows; no more of it than the effort allows."""
        each = [(run.sizes, run.sizes * run.batches, run.position) for run in to_come]
        cost = sum(batches * place for _, batches, place in each)
        left = max(0.0, self._passes * max(1, self._batches.expected) - self._spent)
        share = min(1.0, left / cost) if cost > 0 else 0.0
        self._total_work = self._worked + share * sum(batches * _time(place) for _, batches, place in each)
        self._total_sizes = self.sizes + share * sum(sizes for sizes, _, _ in each)

    def ran(self, plan: RankPlan) -> None:
        """Count a batch that a network has run, or such a part of one as `weight` says."""
        self.spend(plan, self.weight)

    def spend(self, plan: RankPlan, batches: float) -> None:
        """Count so many batches that a network has run."""
        self._spent += position(plan) * batches
        self._worked += _time(position(plan)) * batches
        text = f"{self.sizes} of about {max(self.sizes, round(self._total_sizes))} {self._noun}"
        self._tracker.update(self._worked, text, total=max(self._worked, self._total_work))

    def allows(self, batch_passes: float) -> bool:
        """Return whether so much more is within the effort, in passes of the full network over one batch."""
        return self._spent + batch_passes <= self._passes * self._batches.count


def _time(place: float) -> float:
    """Return what time is proportional to: not all that a network does becomes less with its MACs."""
    return (1 + place) / 2


class _Gap(NamedTuple):
    """Two neighbours by their places in the list of all sizes, and how far off the one was that made them such."""

    minus_difference: float
    low: int
    high: int

    def runs(self, positions: NDArray[np.float64], batches: float) -> _Runs:
        """Return what will be run between them, as far as one can guess, each size on so many batches."""
        off = -self.minus_difference / _TOLERANCE if math.isfinite(self.minus_difference) else _UNKNOWN
        sizes = min(self.high - self.low - 1, max(1.0, off * (_PER_TOLERANCE + _GROWTH * off)))
        return _Runs(sizes, math.sqrt(positions[self.low] * positions[self.high]), batches)


class _Point(NamedTuple):
    """A size that is measured: its statistics on all batches, and on a part of them."""

    plan: RankPlan
    whole: Row
    some: Row


@dataclass(eq=False)
class _Grid:
    """What is measured so far, and the gaps in it."""

    subject: CalibrationTarget
    sizes: _Sizes
    effort: _Effort
    gaps: list[_Gap]  # a heap: the largest difference is next
    points: dict[int, _Point]  # by their places in the list of all sizes
    part: list[Any]
    length: float  # of the part, in batches
    judge: _Judge
    share: float  # of a batch, that it is judged on

    @classmethod
    def coarse(cls, subject: CalibrationTarget, sizes: _Sizes, batches: Kept, effort: _Effort, passes: float) -> _Grid:
        """Measure both ends and some sizes in between, on all batches and then on the part."""
        places = _coarse(sizes.costs, sizes.total, passes)
        plans = [sizes.plan(place) for place in places]
        gaps = [_Gap(-math.inf, low, high) for low, high in pairwise(places)]
        count = max(1, batches.expected)
        first = [_Runs(1, position(plan), (1 + _PART) * count) for plan in plans]
        effort.expect([*first, *(gap.runs(sizes.positions, 1.5 * _PART * count) for gap in gaps)])
        whole = some = measured(subject, plans, batches, effort.ran)
        part, length = batches.part(_PART)
        head, share = batches.head(_COMPARED)
        effort.weight = length / len(part)
        if length < batches.count:
            some = measured(subject, plans, part, effort.ran)
        effort.sizes = len(plans)
        points = dict(zip(places, map(_Point, plans, whole, some), strict=True))
        judge = _Judge(subject, head)
        effort.spend(subject.full_plan, share)
        return cls(subject, sizes, effort, gaps, points, part, length, judge, share)

    def refine(self, gap: _Gap) -> bool:
        """Measure the size in the middle of a gap, where there is one; False where the effort does not allow it."""
        _, low, high = gap
        if high - low < 2:
            return True
        middle = _middle(self.sizes.costs, low, high)
        plan = self.sizes.plan(middle)
        is_last = high - low == 2  # there is no other size between them, and so no interpolation to judge
        judging = 0.0 if is_last else 2 * self.share
        if not self.effort.allows(position(plan) * (self.length + judging)):
            return False
        network = self.subject.build(plan)
        [newer] = measured(replace(self.subject, build=lambda _: network), [plan], self.part, self.effort.ran)
        ends = self.points[low], self.points[high]
        whole = self._between(plan, ends, [end.whole for end in ends])
        some = self._between(plan, ends, [end.some for end in ends])
        refined = {name: _corrected(whole[name], some[name], newer[name]) for name in newer}
        self.points[middle] = _Point(plan, refined, newer)
        difference = 0.0 if is_last else self.judge(network, whole, refined)
        self.effort.sizes += 1
        self.effort.spend(plan, judging)
        if difference > _TOLERANCE:
            for half in ((low, middle), (middle, high)):
                heapq.heappush(self.gaps, _Gap(-difference, *half))
        return True

    def _between(self, plan: RankPlan, ends: tuple[_Point, _Point], rows: list[Row]) -> Row:
        """Return what interpolation gives for a size between two others."""
        found = as_statistics(self.subject, [end.plan for end in ends], rows).at(plan)
        assert found is not None  # the full size lies between no others
        return found


def _corrected(whole: tuple[Tensor, ...], some: tuple[Tensor, ...], newer: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return interpolated mean and variance on all batches, changed as measuring changes them on a part of them."""
    mean, variance = newer
    return mean + whole[0] - some[0], variance * whole[1] / some[1].clamp_min(torch.finfo(variance.dtype).tiny)


def _coarse(costs: Ints, total: int, passes: float) -> list[int]:
    """Return places in the list of all sizes: both ends, and as many in between as a part of the effort allows."""
    for ratio in _COARSE:
        chosen = [len(costs) - 1]
        while chosen[-1] > 0:
            below = int(np.searchsorted(costs, costs[chosen[-1]] / ratio, side="right")) - 1
            chosen.append(max(0, min(below, chosen[-1] - 1)))
        if costs[chosen].sum() * (1 + _PART) <= passes * total / 2:
            break
    return chosen[::-1]


def _middle(costs: Ints, low: int, high: int) -> int:
    """Return the place of the size in the middle of two, by their ratio."""
    found = int(np.searchsorted(costs, math.sqrt(float(costs[low]) * float(costs[high]))))
    return min(max(found, low + 1), high - 1)


class _Judge:
    """How far the outputs of a size are apart with one set of statistics and with another."""

    def __init__(self, subject: CalibrationTarget, batch: Any) -> None:
        self._subject, self._batch = subject, batch
        self._full = self._outputs(subject.build(subject.full_plan).eval(), {})

    def __call__(self, network: nn.Module, one: Row, other: Row) -> float:
        """Return the difference as a part of the outputs' spread.

        It counts less the less the outputs have in common with the full network's: where a size is so small that they
        are noise, no statistics would mend it.
        """
        network.eval()
        pairs = zip(self._outputs(network, one), self._outputs(network, other), self._full, strict=True)
        apart = [_quotient((a - b).norm(), _spread(b).norm()) * math.sqrt(_likeness(b, full)) for a, b, full in pairs]
        return max(apart, default=0.0)

    def _outputs(self, network: nn.Module, statistics: Row) -> list[Tensor]:
        for name, (mean, var) in statistics.items():
            network.get_submodule(name)._buffers.update(running_mean=mean, running_var=var)
        found = tensors_in(self._subject.forward(network, self._batch))
        return [t.detach().float() for t in found if t.is_floating_point() and t.numel()]


def _spread(outputs: Tensor) -> Tensor:
    """Return how the outputs of every sample differ from the samples' mean; of a single one, the output itself."""
    return outputs - outputs.mean(dim=0) if outputs.dim() > 1 and len(outputs) > 1 else outputs


def _likeness(outputs: Tensor, full: Tensor) -> float:
    """Return the correlation of two networks' outputs, 0 to 1."""
    a, b = _spread(outputs), _spread(full)
    return max(0.0, _quotient((a * b).sum(), a.norm() * b.norm()))


def _quotient(part: Tensor, whole: Tensor) -> float:
    """Return 0 where there is none that is a finite number."""
    found = float(part) / float(whole) if whole > 0 else 0.0
    return found if math.isfinite(found) else 0.0
