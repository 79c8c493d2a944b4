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
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from decomposable.network.calibration.batches import Kept, tensors_in
from decomposable.network.calibration.effort import Effort, Runs, sizes_between
from decomposable.network.calibration.statistics import CalibrationTarget, Row, Statistics, measured
from decomposable.progress import Report
from decomposable_edge.sizing.interpolation import position
from decomposable_edge.sizing.plans import RankPlan
from decomposable_edge.sizing.ranks import Ints, Measure, RankSelector
from decomposable_edge.sizing.rounding import Align, calibrated_as

PASSES = 60.0
"""How many passes of the full network a grid may cost, unless something else is asked for."""

_COARSE = (1.5, 2.0, 4.0, math.inf)  # how far apart sizes of the coarse grid are; the first that the effort allows
_PART = 0.2  # of the batches, that refined sizes are measured on
_TOLERANCE = 0.045  # of the outputs' spread: what interpolation may change
_COMPARED = 32  # samples that outputs are compared on


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
    """Statistics from the smallest size to the largest one by a measure, for `passes` passes of the full network at
    most; how many it took, and whether the grid is as dense as it has to be.
    """
    sizes = _Sizes(selector, measure, align)
    effort = Effort(batches, passes, report, sizes.noun)
    grid = _Grid.coarse(subject, sizes, batches, effort, passes)
    is_allowed = True
    while grid.gaps and is_allowed:
        grid.expect()
        is_allowed = grid.refine(heapq.heappop(grid.gaps))
    return replace(grid.whole, grids=(calibrated_as(align),)), effort.spent, is_allowed


class _Sizes:
    """All sizes by a measure, smallest first."""

    def __init__(self, selector: RankSelector, measure: Measure, align: Align) -> None:
        self._selector, self._measure, self._align = selector, measure, align
        self.costs, self.total = selector.all_costs(align, measure), selector.full_cost(measure)
        self.positions = self.costs / self.total

    @property
    def noun(self) -> str:
        """What they are called where there is another list of sizes besides."""
        by = "MACs" if self._measure == "macs" else "parameters"
        return "sizes" if len(self._selector.measures) == 1 else f"sizes by {by}"

    def plan(self, place: int) -> RankPlan:
        return self._selector.of_size(int(self.costs[place]), self._measure, align=self._align)


class _Gap(NamedTuple):
    """Two neighbours by their places in the list of all sizes, and how far off the one was that made them such."""

    minus_difference: float
    low: int
    high: int

    def runs(self, positions: NDArray[np.float64], batches: float) -> Runs:
        """What will be run between them, as far as one can guess, each size on so many batches."""
        is_known = math.isfinite(self.minus_difference)
        tolerances = -self.minus_difference / _TOLERANCE if is_known else None
        middle = math.sqrt(positions[self.low] * positions[self.high])
        return Runs(sizes_between(self.high - self.low - 1, tolerances), middle, batches)


@dataclass(eq=False)
class _Grid:
    """What is measured so far, on all batches and on a part of them, and the gaps in it."""

    subject: CalibrationTarget
    sizes: _Sizes
    effort: Effort
    gaps: list[_Gap]  # a heap: the largest difference is next
    whole: Statistics
    some: Statistics
    part: list[Any]
    length: float  # of the part, in batches
    judge: _Judge
    share: float  # of a batch, that it is judged on

    @classmethod
    def coarse(cls, subject: CalibrationTarget, sizes: _Sizes, batches: Kept, effort: Effort, passes: float) -> _Grid:
        """Both ends and some in between, on all batches and then on the part."""
        places = _coarse(sizes.costs, sizes.total, passes)
        plans = [sizes.plan(place) for place in places]
        gaps = [_Gap(-math.inf, low, high) for low, high in pairwise(places)]
        count = max(1, batches.expected)
        first = [Runs(1, position(plan), (1 + _PART) * count) for plan in plans]
        effort.expect([*first, *(gap.runs(sizes.positions, 1.5 * _PART * count) for gap in gaps)])
        whole = some = measured(subject, plans, batches, effort.ran)
        part, length = batches.part(_PART)
        head, share = batches.head(_COMPARED)
        effort.weight = length / len(part)
        if length < batches.count:
            some = measured(subject, plans, part, effort.ran)
        effort.sizes = len(plans)
        judge = _Judge(subject, head)
        effort.spend(subject.full_plan, share)
        return cls(subject, sizes, effort, gaps, whole, some, part, length, judge, share)

    def expect(self) -> None:
        """Tell the effort what is to come, as far as one can guess."""
        self.effort.expect(gap.runs(self.sizes.positions, self.length + 2 * self.share) for gap in self.gaps)

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
        newer = measured(self.subject, [plan], self.part, self.effort.ran)
        refined = _corrected(self.whole, self.some, newer, plan)
        difference = 0.0 if is_last else self.judge(plan, _at(self.whole, plan), _at(refined, plan))
        self.effort.sizes += 1
        self.effort.spend(plan, judging)
        self.whole, self.some = self.whole.merged(refined), self.some.merged(newer)
        if difference > _TOLERANCE:
            for half in ((low, middle), (middle, high)):
                heapq.heappush(self.gaps, _Gap(-difference, *half))
        return True


def _coarse(costs: Ints, total: int, passes: float) -> list[int]:
    """Places in the list of all sizes: both ends, and as many in between as a part of the effort allows."""
    for ratio in _COARSE:
        chosen = [len(costs) - 1]
        while chosen[-1] > 0:
            below = int(np.searchsorted(costs, costs[chosen[-1]] / ratio, side="right")) - 1
            chosen.append(max(0, min(below, chosen[-1] - 1)))
        if costs[chosen].sum() * (1 + _PART) <= passes * total / 2:
            break
    return chosen[::-1]


def _middle(costs: Ints, low: int, high: int) -> int:
    """The place of the size in the middle of two, by their ratio."""
    found = int(np.searchsorted(costs, math.sqrt(float(costs[low]) * float(costs[high]))))
    return min(max(found, low + 1), high - 1)


def _at(statistics: Statistics, plan: RankPlan) -> Row:
    found = statistics.at(plan)
    assert found is not None  # the full size lies between no others
    return found


def _corrected(whole: Statistics, some: Statistics, newer: Statistics, plan: RankPlan) -> Statistics:
    """What interpolation gives on all batches, changed as measuring changes it on a part of them."""
    (all_mean, all_var), (part_mean, part_var) = (
        map(torch.cat, zip(*_at(each, plan).values(), strict=True)) for each in (whole, some)
    )
    scale = all_var / part_var.clamp_min(torch.finfo(part_var.dtype).tiny)
    return replace(newer, mean_SC=newer.mean_SC + all_mean - part_mean, var_SC=newer.var_SC * scale)


class _Judge:
    """How far the outputs of a size are apart with one set of statistics and with another."""

    def __init__(self, subject: CalibrationTarget, batch: Any) -> None:
        self._subject, self._batch = subject, batch
        self._full = self._outputs(subject.build(subject.full_plan).eval(), {})

    def __call__(self, plan: RankPlan, one: Row, other: Row) -> float:
        """As a part of the outputs' spread, and the less the less they have in common with the full network's.

        A size that is so small that its outputs are noise is not worth the effort: no statistics would mend it.
        """
        network = self._subject.build(plan).eval()
        pairs = zip(self._outputs(network, one), self._outputs(network, other), self._full, strict=True)
        apart = [_quotient((a - b).norm(), _spread(b).norm()) * math.sqrt(_likeness(b, full)) for a, b, full in pairs]
        return max(apart, default=0.0)

    def _outputs(self, network: nn.Module, statistics: Row) -> list[Tensor]:
        for name, (mean, var) in statistics.items():
            network.get_submodule(name)._buffers.update(running_mean=mean, running_var=var)
        found = tensors_in(self._subject.forward(network, self._batch))
        return [t.detach().float() for t in found if t.is_floating_point() and t.numel()]


def _spread(outputs: Tensor) -> Tensor:
    """How the outputs of every sample differ from the samples' mean; of a single one, the output itself."""
    return outputs - outputs.mean(dim=0) if outputs.dim() > 1 and len(outputs) > 1 else outputs


def _likeness(outputs: Tensor, full: Tensor) -> float:
    """The correlation of two networks' outputs, 0 to 1."""
    a, b = _spread(outputs), _spread(full)
    return max(0.0, _quotient((a * b).sum(), a.norm() * b.norm()))


def _quotient(part: Tensor, whole: Tensor) -> float:
    """0 where there is none that is a finite number."""
    found = float(part) / float(whole) if whole > 0 else 0.0
    return found if math.isfinite(found) else 0.0
