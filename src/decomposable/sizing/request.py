"""`SizeRequest`: a size as it is asked for. Public functions take it as keywords; below them it is this one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from decomposable.checks import is_integer, is_number
from decomposable.errors import InvalidArgumentError

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
    ranks: Mapping[str, int] | None = None
    latency_ms: float | None = None
    align: int | str | None = None  # checked where it is used
    batch: int | None = None

    def given(self) -> dict[str, Any]:
        """What was asked for, by the name of the argument."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def way(self) -> tuple[str, Any]:
        """By which argument the size is given, and its value; refused where that is not exactly one."""
        ways = {name: value for name, value in self.given().items() if name in _BUDGETS}
        if self.latency_ms is not None:
            if ways:
                raise InvalidArgumentError(
                    f"a size is given by exactly one of {', '.join(_BUDGETS)} or latency_ms; got {', '.join(ways)} and "
                    "latency_ms"
                )
            return "latency_ms", self.latency_ms
        if len(ways) != 1:
            raise InvalidArgumentError(
                f"a size is given by exactly one of {', '.join(_BUDGETS[:-1])} or {_BUDGETS[-1]}; got "
                f"{', '.join(ways) or 'none'}"
            )
        return next(iter(ways.items()))


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
