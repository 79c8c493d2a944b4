"""The settings of elastic training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from decomposable.methods.values import Check, MethodSettings


@dataclass(frozen=True, kw_only=True)
class ElasticSettings(MethodSettings):
    """How the low-rank network is drawn and taught; `balance` (λ) is shared with the paper's method."""

    elastic_macs: tuple[float, float] = (0.06, 0.7)  # parts of the MACs, between which a budget is drawn
    elastic_smallest: float = 0.0  # the share of low-rank steps that take the smallest of them
    elastic_distill: float = 1.0  # how much the low-rank network learns from the full one, and not from the labels
    elastic_turns: bool = True  # one of the two networks in a step; false: both in each, at twice the price
    elastic_refresh: int = 8  # low-rank steps from one SVD to the next

    checks: ClassVar[tuple[Check, ...]] = (
        (("elastic_macs",), "two numbers with 0 < low <= high <= 1, as in 0.06,0.7", lambda v: 0 < v[0] <= v[1] <= 1),
        (("elastic_smallest",), "a number from 0 to below 1", lambda v: 0 <= v < 1),
        (("elastic_distill",), "a number in [0, 1]", lambda v: 0 <= v <= 1),
        (("elastic_refresh",), "an int of at least 1", lambda v: v >= 1),
    )
