"""The plan of a cut by data: at which sizes a network is measured and a cut shared out, and how much work that is.

Work is counted in forward passes of the full network over all samples. What a step takes is known before it begins, but
for the search, which may end early: then it counts as done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from decomposable.core.layers import Layer
from decomposable.core.moments import MOST_MOMENTS, moments_bytes, passes
from decomposable.network.judging import COMPARED_WITH, SEARCHED_WITH
from decomposable.network.samples import Samples
from decomposable.progress import Progress, Report, Tracker
from decomposable_edge.sizing.ranks import RankSelector

SIZES = (0.5, 0.25, 0.12)
"""Parts of the network at which it is measured again."""

FIRST_STEPS = (0.9, 0.71)
"""Sizes above the first of these at which a cut is shared out anew, too: small cuts are wanted most often."""

MEASURED_AGAIN_WITH = 512
"""Samples, in whole batches, that a cut network is measured with: what its bases may become has narrowed by then."""

MEMORY = MOST_MOMENTS * 2 // 3
"""Bytes of moments that are measured at a time: half as much again is held of what measures, while what judges is
measured."""

MEASURING = 6.0  # forward passes that one with gradients and moments takes about
TRIED = 4.0  # ways that a search tries about


def goal_sizes(selector: RankSelector) -> list[float]:
    """The sizes at which this network is measured again."""
    return [size for size in SIZES if size > selector.smallest_size]


def on_the_way(goal: float | None, goals: Sequence[float], smallest: float) -> tuple[float, ...]:
    """The sizes that a cut is shared out anew for, from where the network was measured to the next goal: half-way, by
    the logarithm, and there; on the first way two above it. Behind the last goal is the smallest size that there is.
    """
    steps = (1.0, *goals, smallest)
    place = len(goals) if goal is None else goals.index(goal)
    half_way = (steps[place] * steps[place + 1]) ** 0.5
    if goal is None:
        return (half_way,)
    above = tuple(size for size in FIRST_STEPS if goal < size and size > smallest) if place == 0 else (half_way,)
    return (*above, goal)


class Work:
    """Counts the work of a cut by data, and tells how far it is."""

    def __init__(self, report: Report, *, samples: int, groups: int, searching: int, total: float) -> None:
        self._samples, self._groups, self._searching = samples, groups, searching
        self._where = "the full network"
        self._tracker = Tracker(report, "measuring", total=total, unit="passes")
        self._done, self._detail = 0.0, ""

    @classmethod
    def planned(
        cls,
        layers: Sequence[Layer],
        samples: Samples,
        selector: RankSelector,
        judged_at: Sequence[float],
        report: Report,
    ) -> Work:
        """That of all steps; says what is ahead before it begins."""
        goals = goal_sizes(selector)
        searching = min(samples.judging, SEARCHED_WITH)
        searches = sum(len(on_the_way(goal, goals, selector.smallest_size)) for goal in (*goals, None))
        groups = len(passes(layers, with_gradients=True, memory=MEMORY))
        again = len(goals) * min(samples.all_that_measure.measuring, MEASURED_AGAIN_WITH)
        compared = min(samples.count if samples.are_halves else samples.judging, COMPARED_WITH)
        total = MEASURING * groups * (samples.count + again) + again
        total += 2 * compared * len(judged_at) + TRIED * searching * searches
        memory = moments_bytes(layers, with_gradients=True, memory=MEMORY) * 3 // 2 >> 20
        ahead = f"about {total / samples.count:.0f} passes, up to {memory:,} MiB of moments"
        report(Progress(f"measuring {samples.count} samples, {ahead}"))  # a task of its own, which a log shows whole
        total = round(total / samples.count, 1)
        return cls(report, samples=samples.count, groups=groups, searching=searching, total=total)

    @contextmanager
    def measuring(self, samples: Samples, *, with_judges: bool) -> Iterator[Callable[[], None]]:
        """Moments of the network, by what measures or by all; what comes back is called after every batch."""
        count = samples.count if with_judges else samples.measuring
        batches = samples.batches + (len(samples.judge) if with_judges else 0)
        with self._step(MEASURING * self._groups * count, self._groups * batches, self._where) as seen:
            yield seen

    @contextmanager
    def averaging(self, samples: Samples, size: float) -> Iterator[Callable[[], None]]:
        """Statistics of the network at a size, which it then has."""
        self._where = f"the network at {size:g}x"
        with self._step(samples.measuring, samples.batches, f"statistics at {size:g}x") as seen:
            yield seen

    @contextmanager
    def sharing(self, size: float) -> Iterator[Callable[[], None]]:
        """The search for a way of sharing out a cut; what comes back is called after every way that was tried."""
        with self._step(TRIED * self._searching, int(TRIED), f"sharing out a cut to {size:.2g}x") as tried:
            yield tried

    @contextmanager
    def comparing(self, size: float, samples: int) -> Iterator[None]:
        """Two networks of a size on so many images that were kept out."""
        with self._step(2 * samples, 1, f"judging a cut to {size:g}x"):
            yield

    @contextmanager
    def _step(self, units: float, parts: int, detail: str) -> Iterator[Callable[[], None]]:
        units, done = units / self._samples, 0.0
        self._detail = detail
        self._tell()

        def seen() -> None:
            nonlocal done
            share = min(units / max(1, parts), units - done)
            done += share
            self._done += share
            self._tell()

        yield seen
        self._done += units - done
        self._tell()

    def _tell(self) -> None:
        self._tracker.update(round(min(self._done, self._tracker.total), 1), self._detail)
