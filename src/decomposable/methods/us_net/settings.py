"""The settings of universally slimmable networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from decomposable.methods.values import Check
from decomposable.methods.width.settings import WidthsSettings


@dataclass(frozen=True, kw_only=True)
class UniversalSettings(WidthsSettings):
    """The widths of a step."""

    width_range: tuple[float, float] = (0.25, 1.0)  # the smallest and the largest width
    random_widths: int = 2  # in every step, besides these two

    checks: ClassVar[tuple[Check, ...]] = (
        *WidthsSettings.checks,
        (("width_range",), "two widths with 0 < low <= high <= 1, as in 0.25,1", lambda v: 0 < v[0] <= v[1] <= 1),
        (("random_widths",), "an int of at least 0", lambda v: v >= 0),
    )
