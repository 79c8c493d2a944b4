"""Choosing a `RankPlan` for a budget. numpy only: a device without torch uses the same code.

All bases of the network stand in one list, best score first. A size is a prefix of that list: the first k bases are
kept. So every size is contained in every larger one, and the largest k that fits a budget is one binary search. With
`align`, every cut's number of bases is rounded by a rule of `rounding`, which never falls as the number grows: all this
holds for the rounded sizes as well.

Scores, limits and ranks in arrays are those of all cuts of all layers, in order. What a basis costs may depend on the
rank of its layer's other cut; but a prefix has one rank for each of them, and its cost never falls as it grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decomposable_edge.checks import check_ratio
from decomposable_edge.errors import BudgetError, InvalidArgumentError
from decomposable_edge.sizing.chain import Rank, Ranks, is_rank, rank_of, ranks_of
from decomposable_edge.sizing.cost import LayerCost, LeftAlone
from decomposable_edge.sizing.order import Numbers, best_first, path
from decomposable_edge.sizing.plans import FrozenDict, RankPlan, SizeRequest, absolute_budget
from decomposable_edge.sizing.rounding import DEFAULT_ALIGN, Align, Ints, any_is_wide, check_align, rounded_ranks

Measure = Literal["macs", "params"]

_MOST_BLOCKING = 3  # parts of a network that a message names


class _Table(NamedTuple):
    """For one alignment: every cut's rank by how many of its bases are kept, and by measure what prefixes cost."""

    ranks: tuple[Ints, ...]
    costs: Mapping[str, Ints]


@dataclass(frozen=True, kw_only=True, eq=False)
class RankSelector:
    """Everything that a choice of size depends on; `plan_for` makes the plan.

    Attributes:
        costs: what every decomposed layer costs.
        scores: for each cut of each layer, its bases' scores in descending order.
        params_scores: others, where budgets of parameters have an order of their own.
        fixed_macs, fixed_params: what the network costs besides these layers; None where MACs are not known.
        lower, upper: the limits of the rank of every cut.
        left_alone: the largest parts of what is fixed.
        stored: how many bases of each cut there are, where some are gone.
    """

    costs: tuple[LayerCost, ...]
    scores: tuple[Numbers, ...]
    fixed_macs: int | None
    fixed_params: int
    lower: Ints
    upper: Ints
    left_alone: tuple[LeftAlone, ...] = ()
    stored: Ints | None = None
    params_scores: tuple[Numbers, ...] | None = None

    # Its layers and their cuts

    @cached_property
    def full_ranks(self) -> Ints:
        """Return the full rank of every cut."""
        return np.array([rank for cost in self.costs for rank in cost.full_ranks], dtype=np.int64)

    @property
    def most_ranks(self) -> Ints:
        """Return how many bases of every cut there are."""
        return self.full_ranks if self.stored is None else self.stored

    @cached_property
    def _full(self) -> FrozenDict[Rank]:
        return self.as_ranks(self.full_ranks)

    @cached_property
    def _most(self) -> FrozenDict[Rank]:
        return self.as_ranks(self.most_ranks)

    @cached_property
    def _places(self) -> tuple[slice, ...]:
        """Return where the cuts of each layer are among all."""
        ends = np.cumsum([0, *(len(cost.full_ranks) for cost in self.costs)]).tolist()
        return tuple(slice(begin, end) for begin, end in pairwise(ends))

    @property
    def first_cuts(self) -> list[int]:
        """Return the place of every layer's first cut among all."""
        return [place.start for place in self._places]

    @property
    def scores_by_layer(self) -> dict[str, tuple[Numbers, ...]]:
        """Return what every basis is worth, by layer, for every cut of its chain."""
        pairs = zip(self.costs, self._places, strict=True)
        return {cost.name: tuple(each.copy() for each in self.scores[place]) for cost, place in pairs}

    def by_layer(self, values: Ints) -> Iterator[tuple[LayerCost, Ranks]]:
        """Yield every layer with its part of numbers for all cuts."""
        plain = values.tolist()
        return ((cost, tuple(plain[place])) for cost, place in zip(self.costs, self._places, strict=True))

    def as_ranks(self, values: Ints) -> FrozenDict[Rank]:
        """Return numbers for all cuts as users see them: by layer."""
        return FrozenDict({cost.name: rank_of(ranks) for cost, ranks in self.by_layer(values)})

    def as_array(self, ranks: Mapping[str, Rank]) -> Ints:
        """Return ranks by layer as numbers for all cuts."""
        return np.array([rank for cost in self.costs for rank in ranks_of(ranks[cost.name])], dtype=np.int64)

    # The list of all bases, and what its prefixes cost

    @cached_property
    def order(self) -> Ints:
        """Return all bases, best first."""
        return best_first(self.scores)

    @cached_property
    def params_order(self) -> Ints:
        """Return all bases, best first by what they are worth per parameter; the other order where there is but one."""
        return self.order if self.params_scores is None else best_first(self.params_scores)

    def _order(self, measure: str) -> Ints:
        return self.params_order if measure == "params" else self.order

    @cached_property
    def _cuts_of(self) -> dict[str, Ints]:
        """Return by measure the cut of each basis in its order."""
        cuts = np.repeat(np.arange(len(self.full_ranks)), self.full_ranks)
        return {by: cuts[self._order(by)] for by in ("macs", "params")}

    @cached_property
    def _tables(self) -> dict[Align, _Table]:
        return {}

    def _table(self, align: Align) -> _Table:
        """Return what every prefix of the list comes to with this alignment."""
        align = self.effective_align(align)
        if align == "auto" and not any_is_wide(self.full_ranks):  # it rounds nothing
            align = 1
        if align not in self._tables:
            limits = zip(self.lower.tolist(), self.upper.tolist(), self.full_ranks.tolist(), strict=True)
            ranks = tuple(rounded_ranks(low, high, full, align) for low, high, full in limits)
            table = _Table(ranks, {by: self._cumulative(by, ranks) for by in ("macs", "params")})
            # A new dict, and the old one as it was: a thread may be copying that.
            self.__dict__["_tables"] = {**self._tables, align: table}
        return self._tables[align]

    def effective_align(self, align: object) -> Align:
        """Return the smallest alignment that rounds all ranks as this one does: all above the ranks are the same."""
        checked = check_align(align)
        return checked if checked == "auto" else min(checked, int(self.full_ranks.max(initial=0)) + 1)

    def _cumulative(self, measure: str, ranks: Sequence[Ints]) -> Ints:
        """Return the network's cost after the first 0, 1, 2, … bases of the list; never decreasing."""
        start, steps = self._fixed(measure), [np.zeros(0, np.int64)]
        scores = self.scores if self.params_scores is None or measure == "macs" else self.params_scores
        for layer, place in zip(self.costs, self._places, strict=True):
            order, kept = path(scores[place])
            taken = [ranks[place.start + cut][count] for cut, count in enumerate(kept)]
            cost = np.minimum(layer.dense(measure), layer.chain(measure, taken))
            is_full = np.all([each == full for each, full in zip(taken, layer.full_ranks, strict=True)], axis=0)
            cost[is_full] = layer.dense(measure)
            step = np.empty(len(order), np.int64)
            step[order] = np.diff(cost)
            steps.append(step)
            start += int(cost[0])
        return start + np.cumsum(np.concatenate([[0], np.concatenate(steps)[self._order(measure)]]), dtype=np.int64)

    def prepare(self) -> None:
        """Make the tables now, so that the first choice is as fast as the others."""
        self._table(DEFAULT_ALIGN)
        self._cuts_of, self._full, self._most  # noqa: B018

    # What sizes there are

    def _fixed(self, measure: str) -> int:
        return self.fixed_params if measure == "params" else (self.fixed_macs or 0)

    @property
    def measure(self) -> Measure:
        """Return what a size is a part of: MACs, or parameters if MACs are not known."""
        return "macs" if self.fixed_macs is not None and self.full_cost("macs") else "params"

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Return the measures whose budgets have an order of bases each: one, or where there are two orders, both."""
        return (self.measure,) if self.params_scores is None or self.measure == "params" else ("macs", "params")

    def full_cost(self, measure: Measure) -> int:
        """Return the original network's MACs or parameters."""
        return self._fixed(measure) + sum(cost.dense(measure) for cost in self.costs)

    def smallest_cost(self, measure: Measure, align: Align = DEFAULT_ALIGN) -> int:
        """Return the cost of the smallest size: every layer at its smallest rank."""
        return int(self._table(align).costs[measure][0])

    @property
    def smallest_size(self) -> float:
        """Return the smallest possible part of the original."""
        return self.smallest_cost(self.measure) / self.full_cost(self.measure)

    def all_costs(self, align: Align = DEFAULT_ALIGN, measure: Measure | None = None) -> Ints:
        """Return what every size that there is costs by a measure, from the smallest to the largest."""
        return np.unique(self._table(align).costs[measure or self.measure])

    def largest_left_alone(self, measure: Measure) -> str:
        """Return the largest parts that no size makes smaller, with their share of the whole; "" if there are none."""
        total = self.full_cost(measure)
        parts = [(getattr(part, measure), part.name) for part in self.left_alone]
        largest = sorted(parts, key=lambda part: -part[0])[:_MOST_BLOCKING]
        return ", ".join(f"'{name}' {cost / total:.1%}" for cost, name in largest if cost >= 0.001 * total)

    # Plans

    def plan_for(self, request: SizeRequest) -> RankPlan:
        """Return the plan for a request that is not one for a time, nor for what was measured.

        `net.plan` and `session.plan` go through this, and look at times and at calibrated sizes besides. A ratio is
        rounded to a number only, and given ranks never are: a number above 1 is refused with them.
        """
        way, value = request.way()
        align = check_align(request.align)
        if way in ("macs", "params"):
            return replace(self._within(way, value, align), align=align)  # type: ignore[arg-type]
        if way == "ratio":
            length, literal = round(check_ratio("ratio", value) * len(self.order)), 1 if align == "auto" else align
            return replace(self._literal(self._prefix(length, literal)), align=literal)
        if align not in (1, "auto"):
            why = f"{align!r} with ranks=, but given ranks are not rounded"
            raise InvalidArgumentError.about("align", align, "one of align and ranks", why=why)
        return self._literal(self._check_ranks(value))

    def of_size(self, size: float, measure: Measure | None = None, align: Align | None = None) -> RankPlan:
        """Return the plan for a budget by a measure, by default the one that is known."""
        budget = {measure or self.measure: size}
        return self.plan_for(SizeRequest(**budget, align=align))  # type: ignore[arg-type]

    def full_plan(self) -> RankPlan:
        """Return the largest size that there is: the original network, unless bases are gone."""
        return self._literal(self.most_ranks)

    def smallest_plan(self) -> RankPlan:
        """Return the plan with every layer at its smallest rank."""
        return self._literal(self.lower)

    def plan_of(self, ranks: Ints, dense: NDArray[np.bool_]) -> RankPlan:
        """Return the plan with these ranks, and these layers dense."""
        taken = self.as_ranks(ranks)
        rows = list(zip(self.costs, taken.values(), dense.tolist(), strict=True))
        known = self.fixed_macs is not None
        return RankPlan(
            ranks=taken,
            dense=frozenset(cost.name for cost, _, is_dense in rows if is_dense),
            macs=(self.fixed_macs or 0) + sum(c.macs(r, d) for c, r, d in rows) if known else None,
            params=self.fixed_params + sum(c.params(r, d) for c, r, d in rows),
            ratio=float(ranks.sum() / max(1, self.full_ranks.sum())),
            full_ranks=self._full,
            full_macs=self.full_cost("macs") if known else None,
            full_params=self.full_cost("params"),
        )

    def _prefix(self, length: int, align: Align, measure: Measure = "macs") -> Ints:
        """Return the ranks that the first so many bases of the list come to."""
        kept = np.bincount(self._cuts_of[measure][:length], minlength=len(self.full_ranks))
        return np.array([ranks[k] for ranks, k in zip(self._table(align).ranks, kept, strict=True)], dtype=np.int64)

    def _within(self, measure: Measure, value: float, align: Align) -> RankPlan:
        """Return the longest prefix of the list whose cost is within the budget."""
        if measure == "macs" and self.fixed_macs is None:
            allowed = "params, ratio, ranks, or a network of decompose(model, example_input)"
            text = f"macs={value!r}: the sizes of the feature maps are not known; allowed: {allowed}"
            raise InvalidArgumentError.about("macs", value, allowed, text)
        if self.full_cost(measure) == 0:  # its layers never ran on the example input
            text = f"{measure}={value!r}: the network has none; allowed: params, ratio, ranks"
            raise InvalidArgumentError.about(measure, value, "params, ratio, ranks", text)
        budget = absolute_budget(measure, value, self.full_cost(measure))
        if budget < self.smallest_cost(measure, align):
            raise self._too_small(measure, value, align)
        length = int(np.searchsorted(self._table(align).costs[measure], budget, side="right")) - 1
        ranks = self._prefix(length, align, measure)
        dense = self._is_dense(measure, ranks)
        # A dense layer costs the same at any rank, so it takes the largest that it may have.
        cuts_are_dense = np.repeat(dense, [place.stop - place.start for place in self._places])
        return self.plan_of(np.where(cuts_are_dense, self.upper, ranks), dense)

    def _too_small(self, measure: Measure, value: float, align: Align) -> BudgetError:
        total, unit = self.full_cost(measure), "MACs" if measure == "macs" else "parameters"

        def stated(cost: int) -> str:
            rounded_up = math.ceil(1e6 * cost / total) / 1e6  # what the message states must be possible
            return f"{rounded_up:.6f} of the original ({cost:,} of {total:,} {unit})"

        smallest, unaligned = self.smallest_cost(measure, align), self.smallest_cost(measure, 1)
        rounding, without = "", ""
        if align != 1 and smallest != unaligned:
            rounding, without = f" with align={align}", f"; without align, {stated(unaligned)}"
        parts = self.largest_left_alone(measure)
        blocking = f"; largest parts left alone: {parts}" if parts else ""
        possible = f"the smallest possible is {stated(smallest)}{without}{blocking}"
        text = f"{measure}={value!r} is too small{rounding}: {possible}"
        error = BudgetError.about(measure, value, stated(smallest), text)
        error.smallest, error.blocking = smallest / total, parts
        return error

    def _literal(self, ranks: Ints) -> RankPlan:
        """Return exactly these ranks; a layer whose chain would cost more than dense holds its truncated W̃ densely."""
        return self.plan_of(ranks, self._is_dense("params" if self.fixed_macs is None else "macs", ranks))

    def _is_dense(self, measure: Measure, ranks: Ints) -> NDArray[np.bool_]:
        """Return of every layer whether its chain costs more than it does as one, or would be all of it."""
        found = (
            kept == cost.full_ranks or cost.chain(measure, kept) > cost.dense(measure)
            for cost, kept in self.by_layer(ranks)
        )
        return np.fromiter(found, dtype=bool, count=len(self.costs))

    def _check_ranks(self, ranks: object) -> Ints:
        """Return given ranks; layers not named stay as large as they can be."""
        most = self._most
        if not isinstance(ranks, Mapping):
            allowed = f"ranks by layer name, such as {{'{next(iter(most))}': 1}}"
            raise InvalidArgumentError.about("ranks", ranks, allowed)
        for name, rank in ranks.items():
            if name not in most:
                why = f"'{name}' is not a decomposed layer"
                raise InvalidArgumentError.about("ranks", name, _some(most), why=why)
            if not is_rank(rank, most[name]):
                raise InvalidArgumentError.about("ranks", rank, _allowed(most[name]), layer=name)
        return np.hstack([ranks.get(name, limit) for name, limit in most.items()]).astype(np.int64)

    def check_plan(self, plan: RankPlan) -> None:
        """Refuse a plan of another network, or one that needs bases which are not there."""
        full = self._full
        if not isinstance(plan, RankPlan) or dict(plan.full_ranks) != full or list(plan.ranks) != list(full):
            came, why = type(plan).__name__, "it is not of this network"
            raise InvalidArgumentError.about("plan", came, "what its plan() returns", why=why)
        for name, most in self._most.items():
            if not is_rank(plan.ranks[name], most):
                rank = plan.ranks[name]
                raise InvalidArgumentError.about("plan", rank, _allowed(most), why=f"the rank is {rank}", layer=name)


def _allowed(most: Rank) -> str:
    """Return what may be given for a layer that has at most so many bases, in words."""
    if isinstance(most, tuple):
        return f"a tuple of {len(most)} ints, {' and '.join(f'1 to {limit}' for limit in most)}"
    return f"an int, 1 to {most}"


def _some(names: Mapping[str, Rank], most: int = 5) -> str:
    shown = [f"'{name}'" for name in list(names)[:most]]
    return ", ".join(shown if len(names) <= most else [*shown, f"… ({len(names)} in all)"])
