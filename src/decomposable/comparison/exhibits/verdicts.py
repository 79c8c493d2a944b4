"""When one method counts as better than another: where the ranges over their seeds do not overlap.

Where they do, the two are equal, and to be equal is not to be better. A single run has no range: it is given one of
`CHANCE` to either side, about what another seed changes, so that two single runs are told apart by half a point.
Curves are compared at the rival's own sizes, ours read between its measured ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from decomposable.comparison.exhibits.context import NEAREST, Points, at_size
from decomposable.comparison.exhibits.shown import Claim, judged

CHANCE = 0.25
"""Points of accuracy to either side of a single run."""

FLAT = 2 * CHANCE
"""Points within which two single runs are equal."""

ALMOST_ALL = 0.9

Outcome = Literal["ahead", "equal", "behind"]
Range = tuple[float, float]


def range_at(points: Points, size: float) -> Range:
    """The lowest and the highest accuracy of a curve at a size; NaN where it has none there."""
    low, high = at_size(points, size, "lowest"), at_size(points, size, "highest")
    is_single = any(point["seeds"] < 2 for point in points)
    return (low - CHANCE, high + CHANCE) if is_single else (low, high)


def compared(ours: Range, rival: Range) -> Outcome:
    """Where ours lies.

    >>> compared((90.1, 90.3), (89.0, 90.0)), compared((90.1, 90.3), (90.2, 90.4)), compared((1.0, 2.0), (3.0, 4.0))
    ('ahead', 'equal', 'behind')
    """
    if ours[0] > rival[1]:
        return "ahead"
    return "behind" if ours[1] < rival[0] else "equal"


@dataclass(frozen=True)
class Tally:
    """The outcome at every size of the rivals, and by how much; `alone` are sizes that ours does not have."""

    outcomes: Sequence[Outcome]
    gaps: dict[float, float]  # by size, the smallest
    alone: int

    def __str__(self) -> str:
        """In words.

        >>> print(Tally(["ahead", "equal"], {0.5: 1.0, 0.25: -0.2}, 1))
        ahead at 1, equal at 1, behind at 0 of 2 sizes; least at 0.25× (-0.2) and 0.5× (+1.0); 1 it does not reach
        """
        counts = Counter(self.outcomes)
        words = ", ".join(f"{outcome} at {counts[outcome]}" for outcome in ("ahead", "equal", "behind"))
        worst = sorted(self.gaps.items(), key=lambda item: item[1])[:2]
        least = "; least at " + " and ".join(f"{size:g}× ({gap:+.1f})" for size, gap in worst) if worst else ""
        alone = f"; {self.alone} it does not reach" if self.alone else ""
        return f"{words} of {len(self.outcomes)} sizes{least}{alone}"


def tally(ours: Points, rivals: Iterable[Points], within: Range = (0.0, 1.0)) -> Tally:
    """Ours against every point of the rivals between two sizes."""
    outcomes: list[Outcome] = []
    gaps: dict[float, float] = {}
    alone = 0
    for points in rivals:
        for point in points:
            size = point["macs_fraction"]
            if not (1 - NEAREST) * within[0] <= size <= 1.001 * within[1]:
                continue
            here = at_size(ours, size)
            if not np.isfinite(here):
                alone += 1
                continue
            key = round(size, 3)
            gaps[key] = min(gaps.get(key, np.inf), here - point["accuracy"])
            outcomes.append(compared(range_at(ours, size), range_at([point], size)))
    return Tally(outcomes, gaps, alone)


def better(text: str, found: Tally, share: float = 1.0) -> Claim:
    """A claim that ours is better: at all sizes, or at this share of them."""
    return judged(text, [outcome == "ahead" for outcome in found.outcomes], str(found), share=share)


def not_worse(text: str, found: Tally) -> Claim:
    """A claim that ours is as good, or better."""
    return judged(text, [outcome != "behind" for outcome in found.outcomes], str(found))
