"""The settings of slimmable networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from decomposable.methods.values import Check, is_one_of
from decomposable.methods.width.settings import WidthsSettings, are_widths


@dataclass(frozen=True, kw_only=True)
class SlimmableSettings(WidthsSettings):
    """The widths, and how they are trained together."""

    widths: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    width_loss: str = "mean"  # or "sum" of the losses of all widths

    checks: ClassVar[tuple[Check, ...]] = (
        *WidthsSettings.checks,
        (("widths",), "parts of the channels, as in 0.5,1", are_widths),
        (("width_loss",), "mean, sum", is_one_of("mean", "sum")),
    )
