"""What hardware likes: ranks rounded to multiples. numpy only: a device without torch uses the same code.

A rule gives, for every number of bases that a layer keeps, the rank that it takes instead. No rule ever falls as that
number grows: `ranks` builds on this.

One multiple for the whole network (`aligned_ranks`) makes every layer fast and costs a narrow one much: with 16, rank
23 becomes 16. `auto_ranks` takes for each rank the largest of 16, 8 and 4 that moves it by a few percent at most, so
that wide layers are fast and narrow ones keep their ranks.

That it never falls: say that k < k' went to m > m'. What a coarser multiple allows, a finer one allows too. If m lies
beyond k', it is a smaller move from there, so k' has m's multiple or a coarser one; if m' lies below k, then k has that
of m' or a coarser one. With both, the two have the same multiple, and the nearest rank does not fall. With one of them
or none, the coarser of m and m' lies between the other one and the number that went there, and would have been nearer.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Align = int | Literal["auto"]
"""What ranks are rounded to: multiples of a number, of which 1 is no rounding; or of what suits each rank."""

Ints = NDArray[np.int64]

AUTO_MULTIPLES = (4, 8, 16)
AUTO_UP, AUTO_DOWN = 3, 5
"""How far "auto" may move a rank, in percent. What goes up is paid for by other layers: a narrow one that loses a basis
for it may cost half a point. What goes down leaves them more. Chosen on training images that were held out.
"""

AUTO_NEEDS_NONE = "it needs no statistics but those of unrounded sizes; allowed: an int, such as 8, or none"


def aligned_ranks(lower: int, upper: int, full: int, align: int) -> Ints:
    """The rank that a layer takes for 0, 1, … `full` kept bases: the nearest multiple of `align` within its limits.

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


def auto_ranks(lower: int, upper: int, full: int, up: int = AUTO_UP, down: int = AUTO_DOWN) -> Ints:
    """The rank that a layer takes for 0, 1, … `full` kept bases, moved by at most so many percent up or down.

    It is the nearest multiple of 16, or of 8, or of 4: the first of these that is near enough, where the way up and the
    way down are parts of what is allowed. The limits themselves are allowed as well: the smallest and the largest size
    stay what they are.

    >>> auto_ranks(1, 300, 300)[[9, 23, 25, 31, 78, 101, 103, 150, 299]].tolist()
    [9, 23, 24, 31, 80, 96, 104, 144, 300]
    """
    kept = np.clip(np.arange(full + 1), lower, upper).astype(np.int64)
    ranks = kept
    for multiple in AUTO_MULTIPLES:
        rounded = _nearest(np.union1d(_multiples(lower, upper, multiple), [lower, upper]), kept, up, down)
        most = np.where(rounded > kept, up, down) * kept
        ranks = np.where(100 * np.abs(rounded - kept) <= most, rounded, ranks)
    return ranks


def rounded_ranks(lower: int, upper: int, full: int, align: Align) -> Ints:
    """The rank that a layer takes for 0, 1, … `full` kept bases, by whichever rule."""
    return auto_ranks(lower, upper, full) if align == "auto" else aligned_ranks(lower, upper, full, align)


def described(align: Align) -> str:
    """What it does to ranks, in words.

    >>> described(1), described(8)
    ('ranks not rounded', 'ranks rounded to multiples of 8')
    """
    if align == "auto":
        return f"ranks rounded to multiples of 16, 8 or 4 where that moves them by at most {max(AUTO_UP, AUTO_DOWN)}%"
    return "ranks not rounded" if align == 1 else f"ranks rounded to multiples of {align}"


def _multiples(lower: int, upper: int, of: int) -> Ints:
    return np.arange(-(-lower // of) * of, upper + 1, of, dtype=np.int64)


def _nearest(allowed: Ints, kept: Ints, up: int = 1, down: int = 1) -> Ints:
    """Of allowed ranks in order the nearest to each, ways up divided by `up`, down by `down`; of equal, the larger."""
    # Between two neighbours is a point from where both are as near. The number of them that are reached is the place.
    points = up * allowed[:-1] + down * allowed[1:]
    return allowed[np.searchsorted(points, (up + down) * kept, side="right")]
