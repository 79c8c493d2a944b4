"""The one list of all bases, best first, of which every size is a prefix; and the limits of every rank. numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from decomposable_edge.checks import check_count, is_integer
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.rounding import Ints

Limits = Mapping[str, tuple[int | None, int | None]]


def prefix_ranks(scores: Sequence[NDArray[np.float64]], ratio: float, lower: Ints, upper: Ints) -> Ints:
    """Ranks after keeping the best round(Z·ΣR) bases of the network, each raised or cut to its cut's limits.

    >>> prefix_ranks([np.array([9.0, 1.0]), np.array([5.0, 4.0])], 0.5, np.array([1, 1]), np.array([2, 2])).tolist()
    [1, 1]
    >>> prefix_ranks([np.array([9.0, 1.0]), np.array([5.0, 4.0])], 0.75, np.array([1, 1]), np.array([2, 2])).tolist()
    [1, 2]
    """
    layer_of = np.repeat(np.arange(len(scores)), [len(s) for s in scores])
    kept = best_first(scores)[: round(ratio * len(layer_of))]
    return np.clip(np.bincount(layer_of[kept], minlength=len(scores)), lower, upper)


def best_first(scores: Sequence[NDArray[np.float64]]) -> Ints:
    """Positions of all bases in the layers' scores laid end to end, best first; what is equal stays in order."""
    return np.argsort(-np.concatenate(list(scores)), kind="stable") if scores else np.zeros(0, np.int64)


def rank_limits(
    names: Sequence[str], full_ranks: Sequence[int], min_rank: int, limits: Limits | None
) -> tuple[Ints, Ints]:
    """The smallest and largest rank of every cut: `min_rank` and its full rank, narrowed by name patterns.

    `names` are the layers that the cuts are of. A later pattern overrides an earlier one. A pattern that matches no
    layer is an error: it is a typo.
    """
    full = np.asarray(full_ranks, dtype=np.int64)
    lower, upper = np.minimum(check_count("min_rank", min_rank), full), full.copy()
    for pattern, bounds in (limits or {}).items():
        matched = [i for i, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not matched:
            raise InvalidArgumentError(f"limits: the pattern {pattern!r} matches none of the {len(set(names))} layers")
        if not isinstance(bounds, tuple | list) or len(bounds) != 2:
            raise InvalidArgumentError(f"limits[{pattern!r}]={bounds!r}; allowed: a pair (smallest, largest)")
        smallest, largest = bounds
        low, high = 1 if smallest is None else smallest, full.max() if largest is None else largest
        if not (is_integer(low) and is_integer(high) and 1 <= low <= high):
            raise InvalidArgumentError(f"limits[{pattern!r}]={bounds!r}; allowed: ints with 1 <= smallest <= largest")
        upper[matched] = np.minimum(int(high), full[matched])
        lower[matched] = np.minimum(int(low), full[matched]) if smallest is not None else lower[matched]
        lower[matched] = np.minimum(lower[matched], upper[matched])
    return lower, upper


def path(scores: Sequence[NDArray[np.float64]]) -> tuple[Ints, list[Ints]]:
    """A layer's bases, best first, and how many of each of its cuts are there after the first 0, 1, 2, … of them.

    They stand among those of the whole network in this order, too: what is equal stays in order there and here.
    """
    counts = [len(each) for each in scores]
    if len(counts) == 1:  # which are in order
        return np.arange(counts[0]), [np.arange(counts[0] + 1)]
    order = best_first(scores)
    cuts = np.repeat(np.arange(len(counts)), counts)[order]
    return order, [np.concatenate([[0], np.cumsum(cuts == cut)]) for cut in range(len(counts))]
