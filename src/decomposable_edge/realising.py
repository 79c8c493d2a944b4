"""What a network consists of at one size. This is the only place where that is decided.

    plan ─┬─ a layer that keeps its full rank ── its own weight, as it is          "full"
          ├─ a layer that runs dense ─────────── one weight, W̃                     "dense"
          ├─ any other layer ─────────────────── the first bases of every stage    "factors"
          └─ statistics and tuned vectors of that size, by their names in the state dict

A module in PyTorch, the state dict of a size, the part of a file that is read, and the graph on a device are made from
this. It knows neither torch nor numpy: whoever has the weights of a layer says as `Bases` what can be done with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from decomposable_edge.sizing.chain import Chain, Ranks, ranks_of
from decomposable_edge.sizing.interpolation import CalibratedSizes, TunedSizes
from decomposable_edge.sizing.plans import RankPlan, RunsAs

T = TypeVar("T")  # a tensor of torch, or an array of numpy


class Bases(Protocol[T]):
    """The weight of one layer, and its factors: (outputs, inputs, kernel), but where a layer *holds* them."""

    @property
    def chain(self) -> Chain:
        """Return the stages."""

    @property
    def kept(self) -> Ranks:
        """Return how many bases of every cut there are."""

    def weight(self) -> T:
        """Return the dense weight as its layer holds it: W, or W̃ of the bases that there are."""

    def first(self, ranks: Ranks, /) -> tuple[T, ...]:
        """Return the weights of the stages with so many bases."""

    def beyond(self, rank: int, /) -> tuple[T, ...]:
        """Return the weights of two stages with all bases but so many."""

    def joined(self, factors: tuple[T, ...], /) -> T:
        """Return the dense weight that stages stand for, as its layer holds it."""

    def held(self, factors: tuple[T, ...], /) -> tuple[T, ...]:
        """Return the weights of stages as their layers hold them."""


@dataclass(frozen=True, eq=False)
class LayerAtSize(Generic[T]):
    """One layer: the weights that it has, as layers hold them. Dense it has one, and else one for every stage."""

    runs_as: RunsAs
    weights: tuple[T, ...]


@dataclass(frozen=True, eq=False)
class NetworkAtSize(Generic[T]):
    """All that a size has of its own, apart from how its layers are wired."""

    layers: Mapping[str, LayerAtSize[T]]
    statistics: Mapping[str, T]
    tuned: Mapping[str, T]  # each laid end to end


def realised(
    plan: RankPlan, layers: Mapping[str, Bases[T]], statistics: CalibratedSizes | None, tuned: TunedSizes | None
) -> NetworkAtSize[T]:
    """Return what the network of a plan consists of."""
    made: dict[str, LayerAtSize[T]] = {}
    for name, bases in layers.items():
        ranks, runs_as = ranks_of(plan.ranks[name]), plan.runs_as(name)
        if runs_as == "factors":
            made[name] = LayerAtSize(runs_as, bases.held(bases.first(ranks)))
        else:
            made[name] = LayerAtSize(runs_as, (bases.weight() if runs_as == "full" else dense_weight(bases, ranks),))
    return NetworkAtSize(made, statistics_at(plan, statistics), {} if tuned is None else tuned.interpolated(plan)[0])


def dense_weight(bases: Bases[Any], ranks: Ranks) -> Any:
    """Return W̃ as one weight: from the bases kept or, with one cut, from those dropped where these are fewer."""
    if ranks == bases.kept:
        return bases.weight()
    if len(ranks) > 1 or 2 * ranks[0] <= bases.chain.full_ranks[0]:
        return bases.joined(bases.first(ranks))
    return bases.weight() - bases.joined(bases.beyond(ranks[0]))  # W is the sum of what its bases are each


def statistics_at(plan: RankPlan, known: CalibratedSizes | None) -> dict[str, Any]:
    """Return the statistics of a size by their names in the state dict; none where it keeps the original's."""
    tables = [] if known is None else known.interpolated(plan)
    return {
        f"{name}.{kind}" if name else kind: values
        for kind, table in zip(("running_mean", "running_var"), tables, strict=False)
        for name, values in table.items()
    }
