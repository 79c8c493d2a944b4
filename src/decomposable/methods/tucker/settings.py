"""The settings of a decomposition at VBMF ranks, and of its fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from decomposable.methods.values import Check, MethodSettings, is_one_of

FORMS = ("tucker", "channel", "spatial")

CIFAR_GRID: dict[str, Any] = {
    "tuning_rates": (0.0005, 0.001, 0.005, 0.01),
    "tuning_weight_decays": (0.00005, 0.0001, 0.0005, 0.001),
    "tuning_schedules": ("steps:0.5", "steps:0.2", "steps:0.1", "polynomial:1", "polynomial:1.5", "polynomial:2"),
}
"""All of appendix D's grid for CIFAR: 96 trainings for each form, of 15 epochs. For both CIFAR sets the paper found
rate 0.01, weight decay 0.001 and polynomial decay of power 1.5 to be best: the defaults of the settings."""

IMAGENET_GRID: dict[str, Any] = {
    "tuning_rates": (0.001, 0.01),
    "tuning_weight_decays": (0.0001, 0.001),
    "tuning_schedules": ("steps:0.2", "steps:0.1"),
}
"""Appendix D's grid for ImageNet; best were rate 0.01, weight decay 0.0001 and a decay of 0.2."""


def tuning_schedule(text: str) -> dict[str, Any] | None:
    """The settings that a schedule of appendix D stands for; None where it is none.

    >>> tuning_schedule("polynomial:1.5"), tuning_schedule("linear")
    ({'schedule': 'polynomial', 'power': 1.5}, None)
    """
    kind, _, number = text.partition(":")
    try:
        value = float(number)
    except ValueError:
        return None
    if kind == "polynomial" and 0 < value < inf:
        return {"schedule": "polynomial", "power": value}
    if kind == "steps" and 0 < value < inf:
        return {"schedule": "steps", "milestones": (1 / 3, 2 / 3), "decay": value}
    return None


@dataclass(frozen=True, kw_only=True)
class TuckerSettings(MethodSettings):
    """The form, and the grid of appendix D, of which the defaults are the point that was best for the paper."""

    vbmf_form: str = "tucker"  # or "channel" or "spatial", in place of Tucker-2

    compare_vbmf_forms: tuple[str, ...] = FORMS
    tuning_epochs: int = 15
    tuning_rates: tuple[float, ...] = (0.01,)
    tuning_weight_decays: tuple[float, ...] = (1e-3,)
    tuning_schedules: tuple[str, ...] = ("polynomial:1.5",)  # a power; or "steps:0.2", a decay at epochs 5 and 10

    swept: ClassVar[Mapping[str, str]] = {"vbmf_form": "compare_vbmf_forms"}
    checks: ClassVar[tuple[Check, ...]] = (
        (("vbmf_form",), "tucker, channel, spatial", is_one_of(*FORMS)),
        (("compare_vbmf_forms",), "some of tucker, channel, spatial", lambda v: v and {*v} <= {*FORMS}),
        (("tuning_epochs",), "an int of at least 1", lambda v: v >= 1),
        (("tuning_rates",), "numbers above 0", lambda v: v and all(0 < r < inf for r in v)),
        (("tuning_weight_decays",), "numbers of at least 0", lambda v: v and all(0 <= r < inf for r in v)),
        (
            ("tuning_schedules",),
            "polynomial:POWER or steps:DECAY, as in polynomial:1.5,steps:0.2",
            lambda v: v and all(tuning_schedule(text) is not None for text in v),
        ),
    )
