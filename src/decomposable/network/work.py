"""The plan of a cut by data: at which sizes the network is measured and the cut is shared out, and how much work it is.

Work is counted in forward passes of the full network over all samples. What each step takes is known before it begins.
Only the search may end early; then it counts as done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise

from decomposable.core.layers import Layer
from decomposable.core.moments import MOST_MOMENTS, moments_bytes, passes
from decomposable.network.judging import COMPARED_WITH, SEARCHED_WITH
from decomposable.network.samples import Samples
from decomposable.progress import Progress, Report, Tracker

SIZES = (0.5, 0.25, 0.12)
"""Parts of the network at which it is measured again."""

FIRST_STEPS = (0.9, 0.71)
"""Sizes above the first of these at which the cut is shared out, too: small cuts are wanted most often."""

MEASURED_AGAIN_WITH = 512
"""Samples, in whole batches, that a cut network is measured with: by then there is less to choose from."""

MEMORY = MOST_MOMENTS * 2 // 3
"""Bytes of moments that are measured at a time. While those of the judges are measured, half as much again is held."""

MEASURING = 6.0  # one pass with gradients and moments takes about as long as so many forward passes
TRIED = 4.0  # ways that a search tries, about

Done = Callable[[], None]
"""To be called when a part of a step is done."""


def stages(smallest: float) -> list[tuple[float | None, tuple[float, ...]]]:
    """Return the sizes to cut to, one after the other, and for each the sizes to share the cut out at on the way.

    These are half-way, by the logarithm, and at the end. The last stage leads to the smallest size and has no goal.

    >>> [(goal, [round(size, 2) for size in steps]) for goal, steps in stages(0.2)]
    [(0.5, [0.9, 0.71, 0.5]), (0.25, [0.35, 0.25]), (None, [0.22])]
    """
    goals = [size for size in SIZES if size > smallest]
    found: list[tuple[float | None, tuple[float, ...]]]
    found = [(goal, ((start * goal) ** 0.5, goal)) for start, goal in pairwise((1.0, *goals))]
    found[:1] = [(goal, (*FIRST_STEPS, goal)) for goal in goals[:1]]
    return [*found, (None, (([1.0, *goals][-1] * smallest) ** 0.5,))]


class Work:
    """Counts the work of a cut by data, and tells how far it is."""

    def __init__(
        self, layers: Sequence[Layer], samples: Samples, smallest: float, judged_at: Sequence[float], report: Report
    ) -> None:
        """Plan all steps, and tell what is ahead."""
        self._samples = samples.count
        self._searching = min(samples.judging, SEARCHED_WITH)
        self._groups = len(passes(layers, with_gradients=True, memory=MEMORY))
        plan = stages(smallest)
        again = (len(plan) - 1) * min(samples.all_that_measure.measuring, MEASURED_AGAIN_WITH)
        compared = min(samples.count if samples.are_halves else samples.judging, COMPARED_WITH)
        total = MEASURING * self._groups * (samples.count + again) + again
        total += 2 * compared * len(judged_at) + TRIED * self._searching * sum(len(steps) for _, steps in plan)
        memory = moments_bytes(layers, with_gradients=True, memory=MEMORY) * 3 // 2 >> 20
        ahead = f"about {total / samples.count:.0f} passes, up to {memory:,} MiB of moments"
        report(Progress(f"measuring {samples.count} samples, {ahead}"))  # a task of its own, which a log shows whole
        self._tracker = Tracker(report, "measuring", total=round(total / samples.count, 1), unit="passes")
        self._done, self._where = 0.0, "the full network"

    def measuring(self, samples: Samples, *, with_judges: bool) -> AbstractContextManager[Done]:
        """Measure moments of the network as it is; a part is a batch."""
        count = samples.count if with_judges else samples.measuring
        batches = samples.batches + (len(samples.judge) if with_judges else 0)
        return self._step(MEASURING * self._groups * count, self._groups * batches, self._where)

    def averaging(self, samples: Samples, size: float) -> AbstractContextManager[Done]:
        """Average the statistics of the network, which has this size from now on; a part is a batch."""
        self._where = f"the network at {size:g}x"
        return self._step(samples.measuring, samples.batches, f"statistics at {size:g}x")

    def sharing(self, size: float) -> AbstractContextManager[Done]:
        """Search for a way to share out a cut; a part is a way that was tried."""
        return self._step(TRIED * self._searching, int(TRIED), f"sharing out a cut to {size:.2g}x")

    def comparing(self, size: float, samples: int) -> AbstractContextManager[Done]:
        """Compare two networks of a size on so many samples."""
        return self._step(2 * samples, 1, f"judging a cut to {size:g}x")

    @contextmanager
    def _step(self, samples: float, parts: int, detail: str) -> Iterator[Done]:
        left = samples / self._samples
        part = left / max(1, parts)

        def done(share: float) -> None:
            nonlocal left
            left -= share
            self._done += share
            self._tracker.update(round(min(self._done, self._tracker.total), 1), detail)

        done(0.0)
        yield lambda: done(min(part, left))
        done(left)
