"""What an exhibit consists of once it is measured; all of it is plain numbers and text, which a record keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from numpy.typing import NDArray

Numbers = Sequence[float] | NDArray[Any]
Verdict = Literal["holds", "fails", "partly", "not tried"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a figure: points, and their range over the seeds where there are several."""

    name: str
    x: Numbers
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()
    method: str = ""  # whose colour it has
    is_dashed: bool = False
    is_points: bool = False  # points without a line: each is a training of its own

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y), self.name
        for name in ("x", "y", "low", "high"):
            values = [None if v is None or not math.isfinite(v) else round(float(v), 6) for v in getattr(self, name)]
            object.__setattr__(self, name, values)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What an axis shows."""

    label: str
    is_log: bool = False


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Lines, or bars side by side for each of some categories (whose names `categories` holds, by x)."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    kind: Literal["lines", "bars"] = "lines"
    categories: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper says, whether it is so here, and what was seen."""

    text: str
    verdict: Verdict
    seen: str
    on: str = ""  # which network and data, where an exhibit has several


@dataclass(frozen=True, kw_only=True)
class Shown:
    """An exhibit as it was measured."""

    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    claims: Sequence[Claim] = ()
    explorer: Mapping[str, Any] | None = None  # the sizes of a network, for the page's slider
    notes: Sequence[str] = field(default_factory=tuple)

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def judged(text: str, passed: Sequence[bool], seen: str, *, share: float = 1.0) -> Claim:
    """A claim about several cases: it holds in all of them (or in this share of them), in some or in none."""
    verdict: Verdict = "not tried"
    if passed:
        verdict = "holds" if sum(passed) >= share * len(passed) else "partly" if any(passed) else "fails"
    return Claim(text=text, verdict=verdict, seen=seen)


def seen_on(network: str, claims: Iterable[Claim]) -> list[Claim]:
    """These claims, as they were judged by one of several networks."""
    return [replace(claim, on=network) for claim in claims]
