"""Ranks rounded to what hardware likes. numpy only: a device without torch uses the same code.

A rule gives, for every number of bases that a layer keeps, the rank that it takes instead. No rule ever falls as that
number grows: `ranks` builds on this.

One multiple for the whole network (`aligned_ranks`) makes every layer fast, but costs a narrow one much: with 16, rank
23 becomes 16. `auto_ranks` takes for each rank of a wide layer the largest of 16, 8 and 4 that moves it by a few
percent at most, and leaves narrow layers alone.

Proof that `auto_ranks` never falls: say k < k' went to m > m'. A finer multiple allows all that a coarser one does. If
m lies beyond k', then m is a smaller move from k', so k' has m's multiple or a coarser one. If m' lies below k, then k
has that of m' or a coarser one. With both, the multiples are equal, and the nearest rank does not fall. Otherwise the
coarser of m and m' lies between the other one and the number that went there, and would have been nearer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from decomposable_edge.checks import is_integer
from decomposable_edge.errors import InvalidArgumentError

Align = int | Literal["auto"]
"""What ranks are rounded to: multiples of a number (1 is no rounding), or of what suits each rank."""

DEFAULT_ALIGN: Align = "auto"
"""What ranks are rounded to wherever nothing else is asked for; docs/sizes.md describes it."""

Ints = NDArray[np.int64]

AUTO_MULTIPLES = (4, 8, 16)
AUTO_PERCENT = 5  # how far "auto" may move a rank at most
# Layers with fewer bases are narrow: "auto" leaves them alone. In a ResNet-20, whose widest layers have 192, rank 36 in
# place of 37 in a single layer cost a point at 0.3x, on training images that were held out.
AUTO_WIDE = 256


def check_align(align: object) -> Align:
    """Return what ranks are rounded to: 1 leaves them as they are, and None is the default."""
    if align is None:
        return DEFAULT_ALIGN
    if isinstance(align, str) and align == "auto":
        return "auto"
    if is_integer(align) and align >= 1:
        return int(align)
    raise InvalidArgumentError.about("align", align, "an int of at least 1, such as 8 or 16, or 'auto'")


def calibrated_as(align: Align) -> int:
    """Return the rounding whose batch normalisation statistics serve for this one.

    "auto" moves ranks by so little that it shares those of unrounded ranks.
    """
    return 1 if align == "auto" else align


def aligned_ranks(lower: int, upper: int, full: int, align: int) -> Ints:
    """Return the rank for 0, 1, … `full` kept bases: the nearest multiple of `align` within the limits.

    The full rank is allowed as well, because nothing is factored there. Halfway, the larger one is taken. Where no
    multiple lies within the limits, ranks stay as they are.

    >>> aligned_ranks(1, 10, 10, 4).tolist()
    [4, 4, 4, 4, 4, 4, 8, 8, 8, 10, 10]
    >>> aligned_ranks(1, 3, 3, 4).tolist()
    [1, 1, 2, 3]
    """
    kept = np.clip(np.arange(full + 1), lower, upper).astype(np.int64)
    allowed = _multiples(lower, upper, align)
    if not len(allowed):
        return kept
    return _nearest(np.union1d(allowed, [full]) if upper == full else allowed, kept)


def auto_ranks(lower: int, upper: int, full: int, percent: int = AUTO_PERCENT) -> Ints:
    """Return the rank for 0, 1, … `full` kept bases, moved by at most so many percent.

    It is the nearest multiple of 16, or of 8, or of 4: the first that is near enough. The smallest rank and the full
    one are allowed as well. The largest rank within the limits stays, but none is rounded to it: so a network that
    holds only the sizes up to this one has the same ranks at each of them as the whole network.

    >>> auto_ranks(1, 300, 300)[[9, 23, 39, 78, 101, 103, 150, 178, 299]].tolist()
    [9, 24, 40, 80, 96, 104, 144, 176, 300]
    """
    kept = np.clip(np.arange(full + 1), lower, upper).astype(np.int64)
    ranks, ends = kept, [lower, full] if upper == full else [lower]
    for multiple in AUTO_MULTIPLES if full >= AUTO_WIDE else ():
        rounded = _nearest(np.union1d(_multiples(lower, upper, multiple), ends), kept)
        ranks = np.where(100 * np.abs(rounded - kept) <= percent * kept, rounded, ranks)
    return np.where(kept == upper, upper, ranks)


def any_is_wide(full_ranks: Ints) -> bool:
    """Return whether one of some layers is wide, so that "auto" rounds some of its ranks."""
    return bool((full_ranks >= AUTO_WIDE).any())


@lru_cache(maxsize=4096)  # a training that draws budgets asks for the same ones at every step
def rounded_ranks(lower: int, upper: int, full: int, align: Align) -> Ints:
    """Return the rank for 0, 1, … `full` kept bases, by whichever rule."""
    ranks = auto_ranks(lower, upper, full) if align == "auto" else aligned_ranks(lower, upper, full, align)
    ranks.flags.writeable = False  # shared by all who ask
    return ranks


def described(align: Align) -> str:
    """Return what an alignment does to ranks, in words.

    >>> described(1), described(8)
    ('ranks not rounded', 'ranks rounded to multiples of 8')
    """
    if align == "auto":
        return f"wide layers' ranks rounded to multiples of 16, 8 or 4 where that moves them by at most {AUTO_PERCENT}%"
    return "ranks not rounded" if align == 1 else f"ranks rounded to multiples of {align}"


def _multiples(lower: int, upper: int, of: int) -> Ints:
    return np.arange(-(-lower // of) * of, upper + 1, of, dtype=np.int64)


def _nearest(allowed: Ints, kept: Ints) -> Ints:
    """Return for each rank the nearest allowed one; half-way, the larger one."""
    # The number of middles between neighbours that are reached is the place of the nearest one.
    return allowed[np.searchsorted(allowed[:-1] + allowed[1:], 2 * kept, side="right")]
