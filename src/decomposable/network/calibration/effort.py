"""What a grid of calibrated sizes has cost, what it will still cost, and how far it is.

How many sizes a grid needs turns out while it is made. What is told is what one may expect: between two neighbours the
more, the farther the outputs of the size in their middle were off. On a ResNet-20, cut by its weights and by data, that
is about proportional; the factor is a little too large, so that the time left falls faster than time passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from decomposable.network.calibration.batches import Kept
from decomposable.progress import Report, Tracker
from decomposable_edge.sizing.interpolation import position
from decomposable_edge.sizing.plans import RankPlan

_PER_TOLERANCE, _GROWTH = 1.4, 0.05  # sizes for a difference of x tolerances: x (1.4 + 0.05 x), as many as there are
_UNKNOWN = 12.0  # tolerances, as long as no size between the two was measured


class Runs(NamedTuple):
    """So many sizes that cost about so much of the full network's MACs, each run on so many batches."""

    sizes: float
    position: float
    batches: float

    @property
    def cost(self) -> float:
        """In passes of the full network over one batch."""
        return self.sizes * self.position * self.batches

    @property
    def work(self) -> float:
        """What takes time in proportion: not all that a network does becomes less with its MACs."""
        return self.sizes * _work(self.position) * self.batches


def sizes_between(count: int, tolerances: float | None) -> float:
    """About how many of `count` sizes will be measured, if outputs in the middle were so many tolerances off.

    >>> sizes_between(40, 2.0), sizes_between(2, 2.0), sizes_between(0, 2.0), round(sizes_between(40, None))
    (3.0, 2, 0, 24)
    """
    off = _UNKNOWN if tolerances is None else tolerances
    return min(count, max(1.0, off * (_PER_TOLERANCE + _GROWTH * off)))


class Effort:
    """Counts what has run, in passes of the full network over the loader, and tells how far that is."""

    def __init__(self, batches: Kept, passes: float, report: Report, noun: str = "sizes") -> None:
        self._batches, self._passes, self._noun = batches, passes, noun
        self._tracker = Tracker(report, "calibrating", total=1.0)
        self._spent = self._worked = 0.0  # in passes over one batch, and in time
        self._total_work, self._total_sizes = 1.0, 0.0  # as is expected
        self.weight = 1.0  # of what is run: a whole batch, or a part of one
        self.sizes = 0  # that are measured

    @property
    def spent(self) -> float:
        """In passes over the loader."""
        return self._spent / max(1, self._batches.expected)

    def expect(self, to_come: Iterable[Runs]) -> None:
        """What is still to be run, as far as one knows; no more of it than the effort allows."""
        to_come = list(to_come)
        cost, work, sizes = (sum(part) for part in zip(*((r.cost, r.work, r.sizes) for r in to_come), strict=True))
        left = max(0.0, self._passes * max(1, self._batches.expected) - self._spent)
        share = min(1.0, left / cost) if cost > 0 else 0.0
        self._total_work, self._total_sizes = self._worked + share * work, self.sizes + share * sizes

    def ran(self, plan: RankPlan) -> None:
        """A network has run a batch, or such a part of one as `weight` says."""
        self.spend(plan, self.weight)

    def spend(self, plan: RankPlan, batches: float) -> None:
        """A network has run so many batches."""
        place = position(plan)
        self._spent += place * batches
        self._worked += _work(place) * batches
        text = f"{self.sizes} of about {max(self.sizes, round(self._total_sizes))} {self._noun}"
        self._tracker.update(self._worked, text, total=max(self._worked, self._total_work))

    def allows(self, batch_passes: float) -> bool:
        """Whether so much more is within the effort, in passes of the full network over one batch."""
        return self._spent + batch_passes <= self._passes * self._batches.count


def _work(place: float) -> float:
    return (1 + place) / 2
