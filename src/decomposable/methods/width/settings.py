"""The settings of methods with widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from decomposable.methods.values import Check, MethodSettings


def are_widths(value: Any) -> bool:
    """Whether these are parts of the channels, at least one."""
    return bool(value) and all(0 < width <= 1 for width in value)


@dataclass(frozen=True, kw_only=True)
class WidthsSettings(MethodSettings):
    """What all methods with widths share."""

    width_multiple: int = 1  # channels are rounded down to multiples of this

    checks: ClassVar[tuple[Check, ...]] = ((("width_multiple",), "an int of at least 1", lambda v: v >= 1),)


@dataclass(frozen=True, kw_only=True)
class WidthSettings(WidthsSettings):
    """The one width that is trained."""

    width: float = 1.0  # the part of the channels

    compare_widths: tuple[float, ...] = (0.75, 0.5)

    swept: ClassVar[Mapping[str, str]] = {"width": "compare_widths"}
    checks: ClassVar[tuple[Check, ...]] = (
        *WidthsSettings.checks,
        (("width",), "a part of the channels in (0, 1]", lambda v: 0 < v <= 1),
        (("compare_widths",), "parts of the channels, as in 0.5,1", are_widths),
    )
