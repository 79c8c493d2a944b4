"""The size of a low-rank network that is trained: drawn anew in every step, as a ratio Z or as a budget.

The paper draws Z, the part of all bases of the network that is kept, uniformly. What a network is asked for later is
rather a part of its multiply-accumulates: drawn log-uniformly, small networks are trained as often as large ones, and
each is the very network that ``resize_(macs=...)`` makes of the weights, its dense layers included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from decomposable.checks import check_ratio, is_number
from decomposable.core.layers import Layer
from decomposable.core.tracing import Forward, Trace, layer_costs, on_device_of, other_macs, trace
from decomposable.core.undisturbed import undisturbed
from decomposable.errors import InvalidArgumentError
from decomposable.sizing.ranks import Ints, Measure, RankSelector, prefix_ranks
from decomposable.sizing.request import absolute_budget

Range = tuple[float, float]
Scores = Sequence[NDArray[np.float64]]


@dataclass(frozen=True)
class Size:
    """The ranks of a low-rank network, and what part of all bases, MACs and parameters they are, where that is known."""

    ranks: Mapping[str, int]
    ratio: float
    macs: float = math.nan
    params: float = math.nan


class Draw(Protocol):
    """How the size of one step is found: drawn before its passes, its ranks chosen by the weights of that time."""

    def draw(self, generator: torch.Generator) -> float:
        """Z, or a budget."""

    def choose(self, scores: Scores, drawn: float) -> Size:
        """The ranks for it, given every layer's scores in falling order."""


@dataclass
class DrawRatio:
    """Z ∼ U(α_l, α_u), and r_ℓ after dropping d = (1 − Z) ΣR_ℓ bases across the whole network (section 2.3)."""

    names: Sequence[str]
    lower: Ints
    upper: Ints
    range: Range

    def draw(self, generator: torch.Generator) -> float:
        """Z."""
        low, high = self.range
        return low + (high - low) * _place(generator)

    def choose(self, scores: Scores, drawn: float) -> Size:
        """Taken literally: the best round(Z·ΣR) bases."""
        ranks = prefix_ranks(scores, drawn, self.lower, self.upper).tolist()
        return Size(dict(zip(self.names, ranks, strict=True)), drawn)


@dataclass
class DrawBudget:
    """A budget, log-uniform between two, the smallest of all in a share of the steps; the plan that it buys."""

    selector: RankSelector
    measure: Measure
    range: Range  # as counts
    smallest: float

    def draw(self, generator: torch.Generator) -> float:
        """A count of MACs or parameters."""
        (low, high), place = self.range, _place(generator)
        if place < self.smallest:
            return low
        return low * (high / low) ** ((place - self.smallest) / (1 - self.smallest))

    def choose(self, scores: Scores, drawn: float) -> Size:
        """As `resize_` does; a layer that is cheaper dense is the layer itself."""
        selector = replace(self.selector, scores=tuple(scores))
        # Rounded up, so that the smallest possible budget stays possible.
        plan = selector.of_size(max(2, math.ceil(drawn)), self.measure)
        macs = math.nan if plan.macs_fraction is None else plan.macs_fraction
        return Size(plan.ranks, plan.ratio, macs, plan.params_fraction)


def _place(generator: torch.Generator) -> float:
    return float(torch.rand((), dtype=torch.float64, generator=generator))


def budgets(
    measure: Measure,
    wanted: object,
    smallest: float,
    model: nn.Module,
    layers: Sequence[Layer],
    limits: tuple[Ints, Ints],
    example_input: Any,
    forward: Forward,
) -> DrawBudget:
    """Budgets between two of `wanted`, for what these layers cost in a pass of the model with the example input."""
    if measure == "macs" and example_input is None:
        raise InvalidArgumentError("macs= needs the sizes of the feature maps; allowed: with example_input=...")
    seen = None
    if example_input is not None:
        with undisturbed(model):
            seen = trace(model, on_device_of(model, example_input), forward)
    selector = RankSelector(
        costs=layer_costs(layers, seen or Trace()),
        scores=tuple(np.zeros(layer.full_rank) for layer in layers),
        fixed_macs=None if seen is None else other_macs(layers, seen),
        fixed_params=sum(p.numel() for p in model.parameters()) - sum(layer.weight.numel() for layer in layers),
        lower=limits[0],
        upper=limits[1],
    )
    low, high = pair_of(wanted) or (None, None)
    is_right = is_number(smallest) and 0 <= smallest < 1
    if not is_right:
        raise InvalidArgumentError(
            f"smallest={smallest!r}; allowed: the share of steps with the smallest, 0 to below 1"
        )
    if low is None:
        raise InvalidArgumentError(f"{measure}={wanted!r}; allowed: a budget, or (smallest, largest)")
    for end in (low, high):
        selector.of_size(end, measure)  # what cannot be is refused here, and not in the middle of a training
    total = selector.full_cost(measure)
    counts = absolute_budget(measure, low, total), absolute_budget(measure, high, total)
    if counts[0] > counts[1]:
        raise InvalidArgumentError(f"{measure}={wanted!r}; allowed: (smallest, largest) with smallest <= largest")
    return DrawBudget(selector, measure, counts, float(smallest))


def check_range(ratio: object) -> Range:
    """(α_l, α_u); one number keeps Z fixed."""
    pair = pair_of(ratio)
    if pair is not None:
        low, high = (check_ratio("ratio", value) for value in pair)
        if low <= high:
            return low, high
    raise InvalidArgumentError(f"ratio={ratio!r}; allowed: (smallest, largest) with 0 < smallest <= largest <= 1")


def pair_of(value: Any) -> tuple[Any, Any] | None:
    """Both ends of a range; one number is both."""
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    return (pair[0], pair[1]) if len(pair) == 2 else None
