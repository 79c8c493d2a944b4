"""When one method counts as better than another: where the ranges over their seeds do not overlap.

Where they do, the two are equal, and to be equal is not to be better. A single run has no range: it is given what
another seed may change (`chance`). Curves are compared at the rival's own sizes, ours read between its measured ones.
A rival without a network near the smallest size that a claim speaks of is represented there by its best smaller one:
who has so much to spend may spend less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from decomposable_lab.exhibits.context import NEAREST, Points, at_size
from decomposable_lab.exhibits.shown import Claim, judged

LEAST_CHANCE, PART_OF_ERRORS = 0.25, 0.03
"""Points of accuracy to either side of a single run: this part of its errors, and no less than the first. Two seeds on
Fashion-MNIST, all methods and sizes, are apart by up to 0.4 points in nine of ten cases where a tenth of the answers
are wrong or less, by up to 1 where it is an eighth, and by more beyond (results/paper-laptop/fashion-mnist).
"""

ALMOST_ALL = 0.9

Outcome = Literal["ahead", "equal", "behind"]
Range = tuple[float, float]


def signed(gap: float) -> str:
    """Write points with a sign, but 0 without.

    >>> signed(-0.04), signed(0.26)
    ('0.0', '+0.3')
    """
    return "0.0" if abs(gap) < 0.05 else f"{gap:+.1f}"


def chance(accuracy: float) -> float:
    """Return what another seed may change of an accuracy in percent, to either side.

    >>> chance(92.0), chance(60.0)
    (0.25, 1.2)
    """
    return max(LEAST_CHANCE, PART_OF_ERRORS * (100 - accuracy))


def told_apart(ours: float, theirs: float) -> Outcome:
    """Return how two single runs compare.

    >>> told_apart(91.0, 90.6), told_apart(91.0, 90.4), told_apart(60.0, 62.0)
    ('equal', 'ahead', 'equal')
    """
    return compared((ours - chance(ours), ours + chance(ours)), (theirs - chance(theirs), theirs + chance(theirs)))


def range_at(points: Points, size: float) -> Range:
    """Return the lowest and the highest accuracy of a curve at a size; NaN where it has none there."""
    low, high = at_size(points, size, "lowest"), at_size(points, size, "highest")
    is_single = any(point["seeds"] < 2 for point in points)
    return (low - chance(low), high + chance(high)) if is_single else (low, high)


def range_of(point: Mapping[str, Any]) -> Range:
    """Return the range of one point."""
    return range_at([point], point["macs_fraction"])


def compared(ours: Range, rival: Range) -> Outcome:
    """Return where ours lies.

    >>> compared((90.1, 90.3), (89.0, 90.0)), compared((90.1, 90.3), (90.2, 90.4)), compared((1.0, 2.0), (3.0, 4.0))
    ('ahead', 'equal', 'behind')
    """
    if ours[0] > rival[1]:
        return "ahead"
    return "behind" if ours[1] < rival[0] else "equal"


@dataclass(frozen=True)
class Tally:
    """Hold the outcome at every size of the rivals, and by how much; `alone` are sizes that ours does not have."""

    outcomes: Sequence[Outcome]
    gaps: dict[float, float]  # by size, the smallest
    alone: int

    def __str__(self) -> str:
        """Say it in words.

        >>> print(Tally(["ahead", "equal"], {0.5: 1.0, 0.25: -0.2}, 2))
        ahead at 1, equal at 1, behind at 0 of 2 sizes; least at 0.25× (-0.2) and 0.5× (+1.0); not compared at 2
        """
        counts = Counter(self.outcomes)
        words = ", ".join(f"{outcome} at {counts[outcome]}" for outcome in ("ahead", "equal", "behind"))
        worst = sorted(self.gaps.items(), key=lambda item: item[1])[:2]
        least = "; least at " + " and ".join(f"{size:g}× ({signed(gap)})" for size, gap in worst) if worst else ""
        alone = f"; not compared at {self.alone}" if self.alone else ""
        return f"{words} of {len(self.outcomes)} sizes{least}{alone}"

    def __add__(self, other: Tally) -> Tally:
        """Return both, as one."""
        sizes = {*self.gaps, *other.gaps}
        gaps = {size: min(each.gaps.get(size, np.inf) for each in (self, other)) for size in sizes}
        return Tally([*self.outcomes, *other.outcomes], gaps, self.alone + other.alone)

    @property
    def turned(self) -> Tally:
        """Return the same as the others see it: at their sizes, and what is behind is ahead."""
        other: dict[Outcome, Outcome] = {"ahead": "behind", "equal": "equal", "behind": "ahead"}
        return Tally(
            [other[each] for each in self.outcomes], {size: -gap for size, gap in self.gaps.items()}, self.alone
        )


def tally(ours: Points, rivals: Iterable[Points], within: Range = (0.0, 1.0)) -> Tally:
    """Compare ours with every point of the rivals between two sizes."""
    outcomes: list[Outcome] = []
    gaps: dict[float, float] = {}
    alone = 0
    for points in rivals:
        for size, point in _at_sizes(points, within):
            here = at_size(ours, size)
            if not np.isfinite(here):
                alone += 1
                continue
            key = round(size, 3)
            gaps[key] = min(gaps.get(key, np.inf), here - point["accuracy"])
            outcomes.append(compared(range_at(ours, size), range_of(point)))
    return Tally(outcomes, gaps, alone)


def by_budget(ours: Points, rival: Points) -> Tally:
    """Compare at every size of the rival the best of our networks that is not larger, without interpolation."""
    outcomes: list[Outcome] = []
    gaps: dict[float, float] = {}
    for point in rival:
        size = point["macs_fraction"]
        fitting = [each for each in ours if each["macs_fraction"] <= 1.001 * size]
        if fitting:
            best = max(fitting, key=lambda each: each["accuracy"])
            gaps[round(size, 3)] = best["accuracy"] - point["accuracy"]
            outcomes.append(compared(range_of(best), range_of(point)))
    return Tally(outcomes, gaps, len(rival) - len(outcomes))


def _at_sizes(points: Points, within: Range) -> list[tuple[float, Mapping[str, Any]]]:
    """The points between two sizes, and at the smaller one the best of what is smaller still, if nothing is near."""
    low, high = within
    found = [(p["macs_fraction"], p) for p in points if (1 - NEAREST) * low <= p["macs_fraction"] <= 1.001 * high]
    smaller = [point for point in points if point["macs_fraction"] < (1 - NEAREST) * low]
    if smaller and not any(size <= (1 + NEAREST) * low for size, _ in found):
        found.append((low, max(smaller, key=lambda point: point["accuracy"])))
    return found


def distinct(points: Points) -> list[Mapping[str, Any]]:
    """Return a curve without sizes that are exactly as good as a smaller one: bases of zero make no other network.

    >>> trp = [{"macs_fraction": m, "accuracy": a, "lowest": a, "highest": a} for m, a in ((1, 9), (0.5, 9), (0.2, 7))]
    >>> [point["macs_fraction"] for point in distinct(trp)]
    [0.5, 0.2]
    """
    found = {tuple(point[key] for key in ("accuracy", "lowest", "highest")): point for point in _falling(points)}
    return list(found.values())


def _falling(points: Points) -> list[Mapping[str, Any]]:
    return sorted(points, key=lambda point: -point["macs_fraction"])


def better(text: str, found: Tally, share: float = 1.0) -> Claim:
    """Return a claim that ours is better: at all sizes, or at this share of them."""
    return judged(text, [outcome == "ahead" for outcome in found.outcomes], str(found), share=share)


def the_best(text: str, ours: Range, rivals: Mapping[str, Range], seen: str) -> Claim:
    """Return the claim that no other is as good: beaten by one means no, equal to some means in part."""
    outcomes = [compared(ours, rival) for rival in rivals.values()]
    verdict = judged(text, [outcome == "ahead" for outcome in outcomes], seen)
    return replace(verdict, verdict="fails") if "behind" in outcomes else verdict


def not_worse(text: str, found: Tally) -> Claim:
    """Return a claim that ours is as good, or better."""
    return judged(text, [outcome != "behind" for outcome in found.outcomes], str(found))
