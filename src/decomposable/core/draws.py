"""The size of a low-rank network that is trained: drawn anew in every step, as a ratio Z or as a budget.

The paper draws Z, the part of all bases of the network that is kept, uniformly. What a network is asked for later is
rather a part of its multiply-accumulates: drawn log-uniformly, small networks are trained as often as large ones, and
each is the very network that ``resize_(macs=...)`` makes of the weights, its dense layers included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from decomposable.core.layers import Layer
from decomposable.core.tracing import Forward, Trace, layer_costs, on_device_of, other_macs, trace
from decomposable.core.tree import undisturbed
from decomposable_edge.checks import check_ratio
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.chain import Rank, rank_of
from decomposable_edge.sizing.order import Limits, prefix_ranks, rank_limits
from decomposable_edge.sizing.plans import absolute_budget
from decomposable_edge.sizing.ranks import Ints, Measure, RankSelector

Range = tuple[float, float]
Scores = Sequence[NDArray[np.float64]]


@dataclass(frozen=True)
class DrawnRanks:
    """The ranks of a low-rank network, and what part of all bases, MACs and parameters they are, where known."""

    ranks: Mapping[str, Rank]
    ratio: float
    macs: float = math.nan
    params: float = math.nan


class Draw(Protocol):
    """How the size of one step is found: drawn before its passes, its ranks chosen by the weights of that time."""

    def draw(self, generator: torch.Generator) -> float:
        """Draw Z, or a budget."""

    def choose(self, scores: Scores, drawn: float) -> DrawnRanks:
        """Return the ranks for what was drawn, from each cut's scores in falling order."""


@dataclass
class DrawRatio:
    """Z ∼ U(α_l, α_u), and r_ℓ after dropping d = (1 − Z) ΣR_ℓ bases across the whole network (section 2.3)."""

    full_ranks: Mapping[str, tuple[int, ...]]
    lower: Ints
    upper: Ints
    range: Range

    def draw(self, generator: torch.Generator) -> float:
        """Draw Z."""
        low, high = self.range
        return low + (high - low) * _place(generator)

    def choose(self, scores: Scores, drawn: float) -> DrawnRanks:
        """Taken literally: the best round(Z·ΣR) bases."""
        ranks = iter(prefix_ranks(scores, drawn, self.lower, self.upper).tolist())
        return DrawnRanks({name: rank_of([next(ranks) for _ in full]) for name, full in self.full_ranks.items()}, drawn)


@dataclass
class DrawBudget:
    """A budget, log-uniform between two, the smallest of all in a share of the steps; the plan that it buys."""

    selector: RankSelector
    measure: Measure
    range: Range  # as counts
    smallest_share: float

    def draw(self, generator: torch.Generator) -> float:
        """Draw a count of MACs or parameters."""
        (low, high), place = self.range, _place(generator)
        if place < self.smallest_share:
            return low
        return low * (high / low) ** ((place - self.smallest_share) / (1 - self.smallest_share))

    def choose(self, scores: Scores, drawn: float) -> DrawnRanks:
        """Return the ranks for what was drawn, from each cut's scores in falling order.

        A layer that is cheaper dense is the layer itself.
        """
        selector = replace(self.selector, scores=tuple(scores))
        # Rounded up, so that the smallest possible budget stays possible.
        plan = selector.of_size(max(2, math.ceil(drawn)), self.measure)
        macs = math.nan if plan.macs_fraction is None else plan.macs_fraction
        return DrawnRanks(plan.ranks, plan.ratio, macs, plan.params_fraction)


def _place(generator: torch.Generator) -> float:
    return float(torch.rand((), dtype=torch.float64, generator=generator))


def draw_of(
    ways: Mapping[str, Any],
    smallest_share: float,
    layers: Sequence[Layer],
    bounds: tuple[Ints, Ints],
    selector: Callable[[], RankSelector],
) -> Draw:
    """Return the draw for a `ratio`, or for budgets of `macs` or `params`; refuse what cannot be drawn."""
    given = {way: value for way, value in ways.items() if value is not None}
    if len(given) > 1:
        raise InvalidArgumentError(f"{' and '.join(given)}: got both; allowed: one of {', '.join(ways)}")
    way, value = next(iter(given.items()), ("ratio", (0.01, 0.5)))
    if way == "ratio":
        return DrawRatio({layer.name: layer.full_ranks for layer in layers}, *bounds, _check_range(value))
    measure: Measure = "macs" if way == "macs" else "params"
    return DrawBudget(known := selector(), measure, _check_budgets(known, measure, value), smallest_share)


def limits_of(layers: Sequence[Layer], min_rank: int, limits: Limits | None) -> tuple[Ints, Ints]:
    """Return the smallest and largest rank of each layer's cuts."""
    cuts = [(layer.name, full) for layer in layers for full in layer.full_ranks]
    return rank_limits([name for name, _ in cuts], [full for _, full in cuts], min_rank, limits)


def cost_selector(
    model: nn.Module,
    layers: Sequence[Layer],
    bounds: tuple[Ints, Ints],
    example_input: Any,
    forward: Forward,
    params: int,
) -> RankSelector:
    """Return what sizes of the model cost, from a pass with the example input if there is one; scores come later.

    It has so many `params` of its own, which a tree with modules opened does not show.
    """
    seen = None
    if example_input is not None:
        with undisturbed(model):
            seen = trace(model, on_device_of(model, example_input), forward)
    return RankSelector(
        costs=layer_costs(layers, seen or Trace()),
        scores=tuple(np.zeros(full) for layer in layers for full in layer.full_ranks),
        fixed_macs=None if seen is None else other_macs(layers, seen),
        fixed_params=params - sum(layer.weight.numel() for layer in layers),
        lower=bounds[0],
        upper=bounds[1],
    )


def _check_budgets(selector: RankSelector, measure: Measure, wanted: object) -> Range:
    """Return both ends of a range of budgets, as counts."""
    pair = _pair_of(wanted)
    if pair is None:
        raise InvalidArgumentError(f"{measure}={wanted!r}; allowed: a budget, or (smallest, largest)")
    if measure == "macs" and selector.fixed_macs is None:
        raise InvalidArgumentError("macs= needs the sizes of the feature maps; allowed: with example_input=...")
    low, high = (absolute_budget(measure, end, selector.full_cost(measure)) for end in pair)
    if low > high:
        raise InvalidArgumentError(f"{measure}={wanted!r}; allowed: (smallest, largest) with smallest <= largest")
    for end in pair:
        selector.of_size(end, measure)  # what cannot be is refused here, and not in the middle of a training
    return low, high


def _check_range(ratio: object) -> Range:
    """(α_l, α_u); one number keeps Z fixed."""
    pair = _pair_of(ratio)
    if pair is not None:
        low, high = (check_ratio("ratio", value) for value in pair)
        if low <= high:
            return low, high
    raise InvalidArgumentError(f"ratio={ratio!r}; allowed: (smallest, largest) with 0 < smallest <= largest <= 1")


def _pair_of(value: Any) -> tuple[Any, Any] | None:
    """Return both ends of a range; one number is both."""
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    return (pair[0], pair[1]) if len(pair) == 2 else None
