"""The numbers of elastic training, each found by trials (results/README.md#elastic-training), and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decomposable_edge.checks import is_integer, is_number
from decomposable_edge.errors import InvalidArgumentError

BY_DATA, BY_WEIGHTS = "data", "weights"
"""Where the order of the bases comes from: images, once; or the criterion in each step, as in the paper."""

LOW_STEPS_PER_FULL = 3
"""From trained weights, which need few full steps."""

SHORT = 1000
"""A training from scratch of at most so many steps has no plain steps first, and the two networks take turns."""

WARMUP = 1 / 16
"""The part of a training in which the learning rate rises."""


def _is_range(value: Any) -> bool:
    is_pair = isinstance(value, tuple | list) and len(value) == 2 and all(map(is_number, value))
    return is_pair and 0 < value[0] <= value[1] <= 1


def _is_part(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


CHECKS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("macs", "two numbers with 0 < low <= high <= 1, as in 0.08,0.5", _is_range),
    ("smallest_share", "a number from 0 to below 1", lambda v: _is_part(v) and v < 1),
    ("distill", "a number in [0, 1]", _is_part),
    ("balance", "a number in [0, 1]", _is_part),
    ("low_steps_per_full", "an int of at least 0, or none", lambda v: v is None or (is_integer(v) and v >= 0)),
    ("start", "a part of the training from 0 to 1, or none", lambda v: v is None or _is_part(v)),
    ("even", "a part of the training from 0 to 1", _is_part),
    ("refresh", "an int of at least 1", lambda v: is_integer(v) and v >= 1),
    ("order", f"{BY_DATA}, {BY_WEIGHTS}, or none", lambda v: v in (BY_DATA, BY_WEIGHTS, None)),
)
"""Each option, what is allowed in words, and whether a value is."""


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """How the low-rank network is drawn and taught, and when. Change one to try something else.

    Attributes:
        macs: parts of the MACs, between which a budget is drawn log-uniformly.
        smallest_share: the share of low-rank steps that take the smallest of them.
        distill: d in the low-rank loss (1 − d) · loss + d · KL(full ‖ low).
        balance: λ, the weight of the low-rank gradient; 0 is plain training.
        low_steps_per_full: low-rank steps after each full one, 0 for both networks in each step. By default 3 from
            trained weights; from scratch 0, and 1 in a training of at most `SHORT` steps.
        start: the part of a training from scratch after which there are low-rank steps. By default half, and 0 in a
            training of at most `SHORT` steps.
        even: the part of what is left after which there is one low-rank step after each full one.
        refresh: low-rank steps from one SVD to the next.
        order: of the bases: "data" (once, when the low-rank steps begin) or "weights" (in each step, as in the paper).
            By default by data after plain steps from scratch, else by weights.
    """

    macs: tuple[float, float] = (0.08, 0.5)
    smallest_share: float = 0.0
    distill: float = 0.5
    balance: float = 0.5
    low_steps_per_full: int | None = None
    start: float | None = None
    even: float = 0.6
    refresh: int = 8
    order: str | None = None

    def __post_init__(self) -> None:
        for name, allowed, is_right in CHECKS:
            if not is_right(value := getattr(self, name)):
                raise InvalidArgumentError.about(name, value, allowed)


def cosine(done: float) -> float:
    """Fall from 1 to 0 by half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * done))


def rate_factor(
    step: int, steps: float, *, warmup: float, steady: float, fall: Callable[[float], float] = cosine
) -> float:
    """Return the learning rate of a step as a part of the highest one.

    It rises in the first `warmup` steps, is highest until the part `steady` of the training, and then falls.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    begin = max(warmup, steady * steps)
    return fall(max(0.0, step - begin) / max(1.0, steps - begin))
