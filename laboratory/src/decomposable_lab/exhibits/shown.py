"""What an exhibit consists of once it is measured; all of it is plain numbers and text, which a record keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

from numpy.typing import NDArray

Numbers = Sequence[float] | NDArray[Any]
Verdict = Literal["holds", "fails", "partly", "not tried"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Hold one line of a figure: points, and their range over the seeds if there are several."""

    name: str
    x: Numbers
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()
    method: str = ""  # whose colour it has
    is_dashed: bool = False
    is_points: bool = False  # points without a line: each is a training of its own
    is_hollow: bool = False  # what others printed

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y), self.name
        for name in ("x", "y", "low", "high"):
            values = [None if v is None or not math.isfinite(v) else round(float(v), 6) for v in getattr(self, name)]
            object.__setattr__(self, name, values)


def over_seeds(name: str, x: Sequence[float], values: Sequence[Sequence[float]]) -> Series:
    """Return a line of means, each over the values of all seeds, and their range where there are several.

    >>> line = over_seeds("Z = 1", [0.5], [[91.0, 92.0]])
    >>> line.y, line.low, line.high
    ([91.5], [91.0], [92.0])
    """
    several = any(len(each) > 1 for each in values)
    low, high = ([end(each) for each in values] if several else () for end in (min, max))
    return Series(name=name, x=x, y=list(map(fmean, values)), low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Describe an axis."""

    label: str
    is_log: bool = False


MACS = Axis(label="MACs, as a fraction of the original network's", is_log=True)
ACCURACY = Axis(label="test accuracy (%)")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Hold lines, or bars side by side for each category (`categories` has their names, by x), or dots in a row
    for each of them (by y).
    """

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    kind: Literal["lines", "bars", "dots"] = "lines"
    categories: Sequence[str] = ()
    note: str = ""
    spread: str = "over the seeds"  # what ranges are of


def dots(
    title: str,
    x: Axis,
    rows: Mapping[str, tuple[float, float, float]],
    printed: Mapping[str, float] | None = None,
    note: str = "",
    spread: str = "over the seeds",
) -> Figure:
    """Return a row for each name with its value and range, and beside it what the paper prints of some of them."""
    names, values = list(rows), list(rows.values())
    series = [
        Series(
            name="here",
            x=[value for value, _, _ in values],
            y=list(range(len(names))),
            low=[low for _, low, _ in values],
            high=[high for _, _, high in values],
            is_points=True,
        )
    ]
    if printed:
        series.append(
            Series(
                name="the paper's",
                x=list(printed.values()),
                y=[names.index(name) for name in printed],
                is_points=True,
                is_hollow=True,
            )
        )
    return Figure(
        title=title, x=x, y=Axis(label=""), series=series, kind="dots", categories=names, note=note, spread=spread
    )


@dataclass(frozen=True, kw_only=True)
class Table:
    """Hold rows of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Hold what the paper says, whether it is so here, and what was seen."""

    text: str
    verdict: Verdict
    seen: str
    on: str = ""  # which network and data, where an exhibit has several


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Hold an exhibit as it was measured."""

    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    claims: Sequence[Claim] = ()
    explorers: Sequence[Mapping[str, Any]] = ()  # the sizes of networks, for the page's sliders
    notes: Sequence[str] = field(default_factory=tuple)

    def as_plain(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def judged(text: str, passed: Sequence[bool], seen: str, *, share: float = 1.0) -> Claim:
    """Return a claim about several cases: it holds in all of them (or in this share of them), in some or in none."""
    verdict: Verdict = "not tried"
    if passed:
        verdict = "holds" if sum(passed) >= share * len(passed) else "partly" if any(passed) else "fails"
    return Claim(text=text, verdict=verdict, seen=seen)


def seen_on(network: str, claims: Iterable[Claim]) -> list[Claim]:
    """Return these claims, as they were judged by one of several networks."""
    return [replace(claim, on=network) for claim in claims]
