"""A size of a network as it is asked for, `SizeRequest`, and as it is chosen, `RankPlan`: immutable values.

Public functions take the request as keywords; below them it is this one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

from decomposable_edge.checks import is_integer, is_number, only_one
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.chain import Rank, Ranks, flat_ranks, in_words, ranks_of
from decomposable_edge.sizing.rounding import Align, described
from decomposable_edge.text import printable

RunsAs = Literal["full", "dense", "factors"]
Value = TypeVar("Value")

_BUDGETS = ("macs", "params", "ratio", "ranks")


@dataclass(frozen=True, kw_only=True)
class SizeRequest:
    """One of a budget (`macs` or `params`), a rank ratio Z, given ranks, or a time; and how it is to be met.

    `align` is what ranks are rounded to; `batch` says which of several measured batches counts.

    >>> SizeRequest(macs=0.25, align=8).way()
    ('macs', 0.25)
    """

    macs: float | None = None
    params: float | None = None
    ratio: float | None = None
    ranks: Mapping[str, Rank] | None = None
    latency_ms: float | None = None
    align: int | str | None = None  # checked where it is used
    batch: int | None = None

    def given(self) -> dict[str, Any]:
        """What was asked for, by the name of the argument."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def way(self) -> tuple[str, Any]:
        """By which argument the size is given, and its value; refused where that is not exactly one."""
        names = _BUDGETS if self.latency_ms is None else (*_BUDGETS, "latency_ms")
        ways = {name: value for name, value in self.given().items() if name in names}
        got = ", ".join(name for name in ways if name in _BUDGETS) or "none"
        time = "" if self.latency_ms is None else " and latency_ms"
        either = f"{', '.join(names[:-1])} or {names[-1]}"
        return only_one(ways, f"a size is given by exactly one of {either}; got {got}{time}")


def absolute_budget(option: str, value: float, total: int) -> int:
    """A budget as a count: a float in (0, 1] is a fraction of `total`, 1 is 1.0, a larger int is the count itself.

    >>> absolute_budget("macs", 0.25, 1000), absolute_budget("macs", 1, 1000), absolute_budget("macs", 300, 1000)
    (250, 1000, 300)
    """
    if is_integer(value) and value > 1:
        return int(value)
    if is_number(value) and 0 < value <= 1:
        nearest = round(float(value) * total)  # so that the fraction c / total gives the count c back
        return nearest if nearest / total <= value else nearest - 1
    raise InvalidArgumentError(
        f"{option}={value!r}; allowed: a fraction in (0, 1] as a float, or an absolute count as an int"
    )


class FrozenDict(dict[str, Value]):
    """A dict that cannot be changed, so that the plan, or whatever has it, stays what it was."""

    refusal: ClassVar[str] = "a plan's ranks cannot be changed; make a new plan with resize_(ranks=...)"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(self.refusal)

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One size of a network: how many bases every decomposed layer keeps. Prints as a table.

    `ranks` has an int for every layer with one cut, and a tuple for one with several (`form="tucker"`).
    `macs` and `params` count the whole network, layers left alone included; `macs` is None where the network was
    decomposed without an example input. `dense` names the layers that run as one dense layer. `align` is what the ranks
    were rounded to, and `instead_of` the part of the original that it would have been where the nearest calibrated size
    below took its place; plans with the same ranks are equal, however they came about.
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

    @property
    def flat_ranks(self) -> Ranks:
        """The ranks of all layers, cut by cut, in order; put together once."""
        # Not a `cached_property`: before Python 3.12 all plans share its lock, and a fork while another thread resizes
        # would leave that locked in the child.
        kept: dict[str, Ranks] = self.__dict__
        return kept["_flat_ranks"] if "_flat_ranks" in kept else kept.setdefault("_flat_ranks", flat_ranks(self.ranks))

    @property
    def is_full(self) -> bool:
        """Whether nothing is dropped: the original network."""
        return dict(self.ranks) == dict(self.full_ranks)

    def runs_as(self, name: str) -> RunsAs:
        """What a layer is at this size: the original layer, one dense layer that holds W̃, or its factors."""
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
        if self.align != 1:
            totals.append(described(self.align))
        if self.instead_of is not None:
            totals.append(f"the nearest calibrated size below {self.instead_of:.3f}x, which was not calibrated")
        return "\n".join([*lines, "", ", ".join(totals)])
