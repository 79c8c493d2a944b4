"""The choice of sizes where not all bases of the original are there any more. numpy only, as `ranks.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decomposable.errors import InvalidArgumentError
from decomposable.sizing.plans import RankPlan
from decomposable.sizing.ranks import Ints, RankSelector


@dataclass(frozen=True, kw_only=True, eq=False)
class ShrunkSelector(RankSelector):
    """The choice of sizes where not all bases of the original are there any more: `stored` says how many are."""

    stored: Ints

    def full_plan(self) -> RankPlan:
        """The largest size that there is."""
        return self._literal(self.stored)

    def _check_ranks(self, ranks: Mapping[str, int]) -> Ints:
        """As ever, but at most what is stored; layers not named stay as large as they can be."""
        checked = super()._check_ranks(ranks)
        for cost, rank, most in zip(self.costs, checked.tolist(), self.stored.tolist(), strict=True):
            if cost.name in ranks and rank > most:
                raise InvalidArgumentError(f"ranks: layer '{cost.name}' got {rank}; allowed: an int, 1 to {most}")
        return np.minimum(checked, self.stored)


def with_stored(selector: RankSelector, stored: Ints) -> RankSelector:
    """The same choice of sizes where so many bases of each layer are there."""
    if (stored == selector.full_ranks).all():
        return selector
    return ShrunkSelector(
        costs=selector.costs,
        scores=selector.scores,
        fixed_macs=selector.fixed_macs,
        fixed_params=selector.fixed_params,
        lower=selector.lower,
        upper=selector.upper,
        left_alone=selector.left_alone,
        stored=stored,
    )


def plan_of(selector: RankSelector, ranks: Sequence[int], dense: Sequence[bool]) -> RankPlan:
    """The plan with these ranks, and these layers dense."""
    return selector._plan(np.asarray(ranks, dtype=np.int64), np.asarray(dense, dtype=bool))


def check_plan(plan: RankPlan, selector: RankSelector, stored: Sequence[int]) -> None:
    """Refuse a plan of another network, or one that needs bases which are not there."""
    full_ranks = {cost.name: cost.full_rank for cost in selector.costs}
    if not isinstance(plan, RankPlan) or dict(plan.full_ranks) != full_ranks or list(plan.ranks) != list(full_ranks):
        raise InvalidArgumentError("plan: it is not of this network; allowed: what its selector.choose() returns")
    for name, most in zip(full_ranks, stored, strict=True):
        if not 1 <= plan.ranks[name] <= most:
            raise InvalidArgumentError(f"plan: layer '{name}' has rank {plan.ranks[name]}; allowed: 1 to {most}")
