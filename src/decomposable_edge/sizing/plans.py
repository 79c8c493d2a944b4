"""A size of a network as it is asked for, `SizeRequest`, and as it is chosen, `RankPlan`: immutable values.

Public functions take the request as keywords; below them it is this one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn, TypedDict, TypeVar

from decomposable_edge.checks import is_integer, is_number
from decomposable_edge.errors import InvalidArgumentError, UnknownOptionError
from decomposable_edge.sizing.chain import Rank, in_words, ranks_of
from decomposable_edge.sizing.rounding import DEFAULT_ALIGN, Align, described
from decomposable_edge.text import printable

RunsAs = Literal["full", "dense", "factors"]
Value = TypeVar("Value")

_BUDGETS = ("macs", "params", "ratio", "ranks")


class SizeKeywords(TypedDict, total=False):
    """The keywords that a size is asked for with. None is as good as not given. Exactly one of the first five is given.

    macs, params: a budget for the whole network: a float is a fraction of the original's, an int above 1 a count.
    ratio: the part Z of all bases to keep; taken literally, not rounded unless `align` is a number.
    ranks: a rank by layer name, for a layer with several cuts a tuple; others stay full. Never rounded.
    latency_ms: the time that a pass may take on this machine, where it was measured.

    align: what ranks are rounded to within the budget: "auto" (the default) rounds those of wide layers to 16, 8 or 4
        where that moves them by a few percent at most; a number rounds all to its multiples; 1 rounds none; "measured"
        is what was found to be the fastest here.
    batch: which of several measured batches counts; by default the smallest.
    """

    macs: float | None
    params: float | None
    ratio: float | None
    ranks: Mapping[str, Rank] | None
    latency_ms: float | None
    align: int | Literal["auto", "measured"] | None
    batch: int | None


@dataclass(frozen=True, kw_only=True)
class SizeRequest:
    """What `SizeKeywords` ask for, as one value.

    >>> SizeRequest(macs=0.25, align=8).way()
    ('macs', 0.25)
    """

    macs: float | None = None
    params: float | None = None
    ratio: float | None = None
    ranks: Mapping[str, Rank] | None = None
    latency_ms: float | None = None
    align: int | str | None = None  # None is "auto"; checked where it is used
    batch: int | None = None

    @classmethod
    def of(cls, asker: str, keywords: SizeKeywords, *others: str) -> SizeRequest:
        """Return the request of a function's keywords; refuse unknown ones.

        `others` are the keywords that the function has besides, to be named in the message.

        >>> SizeRequest.of("resize_", {"mac": 0.5})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        decomposable_edge.errors.UnknownOptionError: resize_: got mac=; allowed: macs, params, ratio, ranks, ...
        """
        names = [each.name for each in fields(cls)]
        for name, value in keywords.items():
            if name not in names:
                allowed = ", ".join([*names, *others])
                text = f"{asker}: got {printable(name)}=; allowed: {allowed}"
                raise UnknownOptionError.about(name, value, allowed, text)
        return cls(**keywords)

    def given(self) -> dict[str, Any]:
        """Return what was asked for, by the name of the argument, without defaults."""
        usual = {"align": DEFAULT_ALIGN}
        return {name: value for name, value in vars(self).items() if value is not None and value != usual.get(name)}

    def way(self) -> tuple[str, Any]:
        """Return the argument by which the size is given, and its value; refuse none and several."""
        names = _BUDGETS if self.latency_ms is None else (*_BUDGETS, "latency_ms")
        ways = {name: value for name, value in self.given().items() if name in names}
        if len(ways) == 1:
            return next(iter(ways.items()))
        came = ", ".join(name for name in ways if name in _BUDGETS) or "none"
        came += "" if self.latency_ms is None else " and latency_ms"
        allowed = f"exactly one of {', '.join(names[:-1])} or {names[-1]}"
        raise InvalidArgumentError.about("size", came, allowed, f"a size is given by {allowed}; got {came}")


def absolute_budget(option: str, value: float, total: int) -> int:
    """Return a budget as a count: a float in (0, 1] is a fraction of `total`, 1 is 1.0, a larger int is the count.

    >>> absolute_budget("macs", 0.25, 1000), absolute_budget("macs", 1, 1000), absolute_budget("macs", 300, 1000)
    (250, 1000, 300)
    """
    if is_integer(value) and value > 1:
        return int(value)
    if is_number(value) and 0 < value <= 1:
        nearest = round(float(value) * total)  # so that the fraction c / total gives the count c back
        return nearest if nearest / total <= value else nearest - 1
    allowed = "a fraction in (0, 1] as a float, or an absolute count as an int"
    raise InvalidArgumentError.about(option, value, allowed)


class FrozenDict(dict[str, Value]):
    """A dict that cannot be changed, so that the plan stays what it was."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a plan's ranks cannot be changed; make a new plan with resize_(ranks=...)")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One size of a network: how many bases every decomposed layer keeps. Prints as a table.

    Plans with the same ranks are equal, however they came about.

    Attributes:
        ranks: an int for every layer with one cut, a tuple for one with several (`form="tucker"`).
        dense: the layers that run as one dense layer.
        macs, params: of the whole network; `macs` is None for a network decomposed without an example input.
        align: what the ranks were rounded to.
        instead_of: the part of the original asked for, where the nearest calibrated size below took its place.
        warning: in one line, where batch normalisation has no statistics of this size.
    """

    ranks: Mapping[str, Rank]
    dense: frozenset[str]
    macs: int | None
    params: int
    ratio: float
    full_ranks: Mapping[str, Rank]
    full_macs: int | None
    full_params: int
    align: Align = field(default=1, compare=False)
    instead_of: float | None = field(default=None, compare=False)
    warning: str | None = field(default=None, compare=False)

    @property
    def is_full(self) -> bool:
        """Return whether it is the original network: nothing is dropped."""
        return dict(self.ranks) == dict(self.full_ranks)

    def runs_as(self, name: str) -> RunsAs:
        """Return what a layer is: the original layer, one dense layer that holds W̃, or its factors."""
        if self.ranks[name] == self.full_ranks[name]:
            return "full"
        return "dense" if name in self.dense else "factors"

    @property
    def macs_fraction(self) -> float | None:
        """MACs as a fraction of the original's."""
        return None if self.macs is None or not self.full_macs else self.macs / self.full_macs

    @property
    def params_fraction(self) -> float:
        """Parameters as a fraction of the original's."""
        return self.params / self.full_params

    def __str__(self) -> str:
        shown = {name: printable(name) for name in self.ranks}  # the names may come out of a file
        width = max([len("layer"), *map(len, shown.values())])
        lines = [f"{'layer':<{width}}  {'rank':>6}  {'of':>6}  runs as"]
        for name, rank in self.ranks.items():
            runs_as = in_words(rank) if self.runs_as(name) == "factors" else "dense"  # a full layer is a dense one, too
            kept, full = ("×".join(map(str, ranks_of(each))) for each in (rank, self.full_ranks[name]))
            lines.append(f"{shown[name]:<{width}}  {kept:>6}  {full:>6}  {runs_as}")
        totals = [f"{self.ratio:.1%} of the bases", f"{self.params:,} parameters ({self.params_fraction:.3f}x)"]
        if self.macs is not None:
            totals.append(f"{self.macs:,} MACs ({self.macs_fraction or 0:.3f}x)")
        if self.align not in (1, "auto"):
            totals.append(described(self.align))
        if self.instead_of is not None:
            totals.append(f"the nearest calibrated size below {self.instead_of:.3f}x, which was not calibrated")
        return "\n".join([*lines, "", ", ".join(totals)])


def plan_or_request(asker: str, plan: RankPlan | None, keywords: SizeKeywords) -> RankPlan | SizeRequest:
    """Return what a function that takes a plan or the keywords of a size was given; refuse both, and neither."""
    request = SizeRequest.of(asker, keywords)
    if plan is None:
        request.way()
        return request
    allowed = "a RankPlan alone, or a size by keywords, such as macs=0.25"
    came = type(plan).__name__ if not isinstance(plan, RankPlan) else ", ".join(["a plan", *request.given()])
    if came != "a plan":
        raise InvalidArgumentError.about("plan", came, allowed, f"{asker}: got {came}; allowed: {allowed}")
    return plan
