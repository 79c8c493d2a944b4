"""The one list of all bases, best first, of which every size is a prefix; what a basis is worth; limits of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from decomposable_edge.checks import check_count, is_integer
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.rounding import Ints

Numbers = NDArray[np.float64]
Limits = Mapping[str, tuple[int | None, int | None]]
"""The smallest and largest rank of layers, by patterns of their names."""


def best_first(scores: Sequence[Numbers]) -> Ints:
    """Return the positions of all bases, best first, in the scores laid end to end; equal ones stay in order."""
    return np.argsort(-np.concatenate(list(scores)), kind="stable") if scores else np.zeros(0, np.int64)


def prefix_ranks(scores: Sequence[Numbers], ratio: float, lower: Ints, upper: Ints) -> Ints:
    """Return the ranks after keeping the best round(Z·ΣR) bases of the network, within the limits of each cut.

    >>> prefix_ranks([np.array([9.0, 1.0]), np.array([5.0, 4.0])], 0.5, np.array([1, 1]), np.array([2, 2])).tolist()
    [1, 1]
    >>> prefix_ranks([np.array([9.0, 1.0]), np.array([5.0, 4.0])], 0.75, np.array([1, 1]), np.array([2, 2])).tolist()
    [1, 2]
    """
    layer_of = np.repeat(np.arange(len(scores)), [len(s) for s in scores])
    kept = best_first(scores)[: round(ratio * len(layer_of))]
    return np.clip(np.bincount(layer_of[kept], minlength=len(scores)), lower, upper)


def path(scores: Sequence[Numbers]) -> tuple[Ints, list[Ints]]:
    """Return a layer's bases, best first, and how many of each of its cuts are among the first 0, 1, 2, … of them.

    Within the list of the whole network they stand in the same order.
    """
    counts = [len(each) for each in scores]
    order = best_first(scores) if len(counts) > 1 else np.arange(counts[0])
    cuts = np.repeat(np.arange(len(counts)), counts)[order]
    return order, [np.concatenate([[0], np.cumsum(cuts == cut)]) for cut in range(len(counts))]


def rank_limits(
    names: Sequence[str], full_ranks: Sequence[int], min_rank: int, limits: Limits | None
) -> tuple[Ints, Ints]:
    """Return the smallest and largest rank of every cut: `min_rank` and its full rank, narrowed by name patterns.

    `names` are the layers of the cuts. A later pattern overrides an earlier one. One that matches no layer is refused.
    """
    full = np.asarray(full_ranks, dtype=np.int64)
    lower, upper = np.minimum(check_count("min_rank", min_rank), full), full.copy()
    for pattern, bounds in (limits or {}).items():
        matched = [i for i, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not matched:
            why = f"the pattern {pattern!r} matches none of the {len(set(names))} layers"
            raise InvalidArgumentError.about("limits", pattern, "a pattern that matches a layer", why=why)
        option = f"limits[{pattern!r}]"
        if not isinstance(bounds, tuple | list) or len(bounds) != 2:
            raise InvalidArgumentError.about(option, bounds, "a pair (smallest, largest)")
        smallest, largest = bounds
        low, high = 1 if smallest is None else smallest, full.max() if largest is None else largest
        if not (is_integer(low) and is_integer(high) and 1 <= low <= high):
            raise InvalidArgumentError.about(option, bounds, "ints with 1 <= smallest <= largest")
        upper[matched] = np.minimum(int(high), full[matched])
        lower[matched] = np.minimum(int(low), full[matched]) if smallest is not None else lower[matched]
        lower[matched] = np.minimum(lower[matched], upper[matched])
    return lower, upper


def worth(losses: Numbers, *, per_rank: int, dense: int, is_whole: bool = True) -> Numbers:
    """Return a layer's bases scored by loss per cost, never rising, so that a prefix of all layers' bases is good.

    `losses` is what leaving each basis out loses, best basis first. A layer at rank r costs r · `per_rank`, or `dense`
    where that is less, and at full rank it loses nothing. The best sizes lie where the slopes of loss over cost are
    equal in all layers, on the lower convex hull of each layer's points (cost, loss). So the score of a basis is the
    slope of the hull above it. Bases inside the hull go together, as do those of the step from dense to two factors.
    A layer that is not `is_whole` has lost bases already, and is two factors at all ranks.

    >>> worth(np.array([8.0, 4.0, 2.0, 1.0]), per_rank=1, dense=4).tolist()
    [8.0, 4.0, 2.0, 1.0]
    >>> worth(np.array([8.0, 4.0, 2.0, 1.0]), per_rank=2, dense=4).tolist()  # rank 2 costs as much as all
    [4.0, 3.5, 3.5, 3.5]
    """
    count = len(losses)
    lost = np.append(np.cumsum(losses[::-1])[::-1], 0.0)  # at rank 0, 1, …, K
    cost = np.minimum(np.arange(count + 1) * float(per_rank), dense)
    cost[count] = dense if is_whole else cost[count]

    def slope(low: int, high: int) -> float:
        return float((lost[low] - lost[high]) / max(cost[high] - cost[low], 1.0))

    hull: list[int] = []
    for rank in [*np.flatnonzero(cost[:count] < cost[count]).tolist(), count]:
        while len(hull) > 1 and slope(hull[-2], hull[-1]) <= slope(hull[-1], rank):
            hull.pop()
        hull.append(rank)
    scores = np.zeros(count)
    for low, high in pairwise(hull):
        scores[low:high] = slope(low, high)
    return scores
