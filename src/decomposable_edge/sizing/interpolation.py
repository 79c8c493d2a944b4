"""Between which known sizes a size lies, and where. numpy only: a device without torch uses the same code.

Known are the statistics of calibrated sizes, and the vectors of tuned ones. The two neighbours of a size are the
nearest by their ranks among the smaller and among the larger sizes. Where all sizes are prefixes of one list, those are
the next ones by size; sizes with rounded ranks have neighbours of their own kind. Statistics of a size too far from its
neighbours are not interpolated without a word: see `is_near` and `stepped_down`.

What matters most for a normalisation layer is the rank of the layer that feeds it. So its place between the two
neighbours is that of this rank; only where both neighbours have the same rank is it that of the whole network.
(Interpolating all layers alike loses up to 12 points where some layer becomes dense between the neighbours.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decomposable_edge.sizing.chain import flat_ranks, ranks_of
from decomposable_edge.sizing.plans import RankPlan, SizeRequest, absolute_budget
from decomposable_edge.sizing.ranks import Measure, RankSelector
from decomposable_edge.sizing.rounding import AUTO_PERCENT, AUTO_WIDE, Ints, calibrated_as

_ROUNDING = 1e-9  # distances that are closer to each other than this may be the same

# How far from calibrated sizes a size may be, measured on a trained ResNet-20 (docs/calibration.md): 0.7% beside one
# that stands alone 0.9 points were lost and 1.5% beside it 4.3; between two that are 4.5% apart, up to 1.3.
NEAR = 0.01
CLOSE_NEIGHBOURS = 0.04
NOT_CALIBRATED = (
    "batch normalisation still has the full network's statistics; run calibrate_(loader) once, or: decomposable "
    "calibrate FILE"
)
KEPT = 0.9  # of the budget: what stepping down to a calibrated size must keep


class Between(NamedTuple):
    """Two rows of known sizes, and for every channel how far it is from the lower one to the upper one, 0 to 1.

    The row behind the last one is the original network.
    """

    lower: int
    upper: int
    place_C: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownSizes:
    """Sizes that numbers are known of, smallest first, and what these numbers belong to.

    The numbers of a size lie end to end in a row of each table, an array of whatever library computes with them.

    Attributes:
        tables: the names of the fields that are tables.
        names: what the numbers belong to.
        channels: how many numbers each of these has.
        layer_before_norm: for each the decomposed layer whose rank says where it lies, if there is one.
        positions: of the sizes, ascending: their part of the original's MACs (or parameters).
        original: the row of the original network in each table, the end of every interpolation.
    """

    tables: ClassVar[tuple[str, ...]]

    names: tuple[str, ...]
    channels: tuple[int, ...]
    layer_before_norm: tuple[str | None, ...]
    positions: tuple[float, ...]
    plans: tuple[RankPlan, ...]
    full_plan: RankPlan
    original: tuple[Any, ...]

    @cached_property
    def _ranks(self) -> Ints:
        """Return a row for every size, and the original's behind them."""
        return np.stack([_flat(plan) for plan in (*self.plans, self.full_plan)])

    def prepare(self) -> None:
        """Make now what the first look-up would: another thread may be copying this by then."""
        self._ranks  # noqa: B018

    def _row(self, index: int) -> tuple[Any, ...]:
        """Return what each table has of a size; behind the last one comes the original."""
        is_original = index == len(self.plans)
        return self.original if is_original else tuple(getattr(self, table)[index] for table in self.tables)

    def between(self, plan: RankPlan) -> Between | None:
        """Return where a size lies; None for a full size that keeps what the original has."""
        return None if plan.is_full else self._neighbours(plan)

    def _neighbours(self, plan: RankPlan) -> Between:
        nowhere = np.zeros(sum(self.channels))
        ranks = _flat(plan)
        same = np.flatnonzero((self._ranks[:-1] == ranks).all(axis=1))
        if same.size:
            return Between(int(same[0]), int(same[0]), nowhere)
        larger = int(np.searchsorted(self.positions, position(plan)))
        if larger == 0:
            return Between(0, 0, nowhere)
        distances = (np.abs(self._ranks - ranks) / self._ranks[-1]).sum(axis=1)
        lower = larger - 1 - int(np.argmin(distances[:larger][::-1]))  # of equal ones that of the nearest size
        upper = larger + int(np.argmin(distances[larger:]))
        below, above = (self.full_plan if i == len(self.plans) else self.plans[i] for i in (lower, upper))
        places = [_place(plan, below, above, feeder) for feeder in self.layer_before_norm]
        return Between(lower, upper, np.repeat(places, self.channels))

    def interpolated(self, plan: RankPlan) -> list[dict[str, Any]]:
        """Return what each table has for this size, by name; nothing for a full size that keeps the original's."""
        found = self.between(plan)
        if found is None:
            return [{} for _ in self.tables]
        ends = zip(self._row(found.lower), self._row(found.upper), strict=True)
        return [dict(zip(self.names, self._mixed(*pair, found.place_C), strict=True)) for pair in ends]

    def _mixed(self, low: Any, high: Any, place_C: NDArray[np.float64]) -> Sequence[Any]:
        """Return the row that lies there between two others, name by name."""
        raise NotImplementedError

    def rows_within(self, plan: RankPlan, largest: float) -> list[int]:
        """Return the rows that `between` can choose for any size within this plan, which has no rank above the plan's.

        `largest` is the largest position of all these sizes. Without the other rows, `between` finds the same for them.
        """
        first = int(np.searchsorted(self.positions, largest))  # from here on, rows are only ever the larger neighbour
        most, full = _flat(plan), self._ranks[-1]
        nearest_first = np.argsort((np.abs(self._ranks[first:-1] - most) / full).sum(axis=1), kind="stable")
        kept = [len(self.plans)]  # the original is always there
        for row in (first + nearest_first).tolist():
            if not _is_never_nearest(self._ranks[row], self._ranks[kept], most, full):
                kept.append(row)
        return sorted({*range(max(1, first)), *kept[1:]})


@dataclass(frozen=True, kw_only=True, eq=False)
class TunedSizes(KnownSizes):
    """The sizes that have vectors of their own (scales, shifts and biases), named as the original's parameters."""

    tables = ("values_ST",)

    values_ST: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibratedSizes(KnownSizes):
    """The sizes that normalisation layers were calibrated for: mean and variance of all their channels.

    `alignments` are what their ranks were rounded to, where 1 stands for "auto" as well. Of those in `grids`, the sizes
    are a grid as dense as the network needs.
    """

    tables = ("mean_SC", "var_SC")

    has_explicit_full: bool
    mean_SC: Any
    var_SC: Any
    alignments: tuple[int, ...] = (1,)
    grids: tuple[int, ...] = ()

    def between(self, plan: RankPlan) -> Between | None:
        """Return where a size lies; None for a full size that keeps the original's statistics."""
        return self._neighbours(plan) if plan.is_full and self.has_explicit_full else super().between(plan)

    def is_made_for(self, plan: RankPlan) -> bool:
        """Return whether sizes with ranks rounded as in this plan were calibrated, or the plan itself was."""
        return calibrated_as(plan.align) in self.alignments or self._has(plan)

    def is_near(self, plan: RankPlan) -> bool:
        """Return whether statistics can be interpolated: the size lies in a grid, or near enough to calibrated ones."""
        if calibrated_as(plan.align) in self.grids or self._has(plan):
            return True
        found = self.between(plan)
        if found is None:  # the original
            return True
        places = [*self.positions, position(self.full_plan)]
        below, above, here = places[found.lower], places[found.upper], position(plan)
        is_beside = min(abs(here - below), abs(here - above)) <= NEAR * here
        return is_beside or below < above <= (1 + CLOSE_NEIGHBOURS) * below

    def _has(self, plan: RankPlan) -> bool:
        """Return whether this very size was calibrated; of "auto", one of which it rounds the ranks of wide layers."""
        moved = np.abs(self._ranks - _flat(plan))
        is_same = moved == 0
        if plan.align == "auto":
            is_same |= (self._ranks[-1] >= AUTO_WIDE) & (100 * moved <= AUTO_PERCENT * self._ranks)
        return bool(is_same.all(axis=1).any())

    def stepped_down(self, plan: RankPlan, selector: RankSelector, measure: Measure, budget: int) -> RankPlan:
        """Return, of a plan that is not near, the nearest calibrated one below, where that keeps most of the budget."""
        unrounded = selector.of_size(budget, measure, align=1) if plan.align == "auto" else plan
        if self.is_near(plan) or self.is_near(unrounded):
            return plan
        for row in reversed(self.plans):
            cost = getattr(row, measure)
            if not KEPT * budget <= cost <= budget:
                continue
            for align in dict.fromkeys((plan.align, calibrated_as(plan.align))):
                smaller = selector.of_size(cost, measure, align=align)
                if smaller.ranks == row.ranks:
                    return replace(smaller, instead_of=position(plan))
        return plan

    def calibration_warning(self, plan: RankPlan) -> str | None:
        """Return what to say where the statistics of this size may be far from its own; None where they are not."""
        is_made_for, align = self.is_made_for(plan), calibrated_as(plan.align)
        if plan.is_full or (is_made_for and self.is_near(plan)):
            return None
        option, flag = ("", "") if align == 1 else (f", align={align}", f" --align {align}")
        if not is_made_for:
            kind = "rounded ranks only" if align == 1 else f"ranks that were not rounded to multiples of {align}"
            return (
                f"batch normalisation has statistics of {kind}, which may cost much accuracy; run "
                f"calibrate_(loader{option}) once, or: decomposable calibrate FILE{flag}"
            )
        unit = "parameters" if plan.macs_fraction is None else "MACs"
        sizes = [f"{place:.3g}x" for place in self.positions]
        some = sizes if len(sizes) <= 4 else [*sizes[:2], "…", sizes[-1]]
        return (
            f"batch normalisation was calibrated for {', '.join(some)} of the {unit}, too far from this size of "
            f"{position(plan):.3g}x to know its statistics, which may cost much accuracy; run "
            f"calibrate_(loader{option}) once, which any size can be taken after, or: decomposable calibrate FILE{flag}"
        )


def _flat(plan: RankPlan) -> Ints:
    return np.array(flat_ranks(plan.ranks), dtype=np.int64)


def _is_never_nearest(row: Ints, others: Ints, most: Ints, full: Ints) -> bool:
    """Return whether one of the others is nearer than this row to all ranks from 1 to `most`.

    How much farther away the row is than another one falls in a layer's rank where the row has more of it, and rises
    where it has less; so over all these ranks it is least at the largest rank or at rank 1.
    """
    farther = np.where(row > others, np.abs(row - most) - np.abs(others - most), row - others)
    return bool(((farther / full).sum(axis=1) > _ROUNDING).any())


def _place(plan: RankPlan, below: RankPlan, above: RankPlan, feeder: str | None) -> float:
    """Return how far from one known size to the next a layer of this plan is, from 0 to 1."""
    if feeder is not None:
        here, low, high = (sum(ranks_of(each.ranks[feeder])) for each in (plan, below, above))
        if low != high:
            return float(np.clip((here - low) / (high - low), 0, 1))
    width = position(above) - position(below)
    return float(np.clip((position(plan) - position(below)) / width, 0, 1)) if width > 0 else 1.0


def position(plan: RankPlan) -> float:
    """Return where a size lies between nothing and the original."""
    return plan.params_fraction if plan.macs_fraction is None else plan.macs_fraction


def choose_calibrated(selector: RankSelector, calibrated: CalibratedSizes | None, request: SizeRequest) -> RankPlan:
    """Return the plan for a request, or the nearest calibrated one below where its statistics would be a guess.

    A ratio and given ranks are no budgets, and are taken literally.
    """
    plan = selector.plan_for(request)
    way, value = request.way()
    if calibrated is None or way not in ("macs", "params"):
        return plan
    measure: Measure = "macs" if way == "macs" else "params"
    return calibrated.stepped_down(plan, selector, measure, absolute_budget(way, value, selector.full_cost(measure)))


def with_warning(plan: RankPlan, calibrated: CalibratedSizes | None, *, has_norms: bool) -> RankPlan:
    """Return the plan with what is to be said of its statistics in `warning`.

    `has_norms` says whether the network has batch normalisation, for which there must be some.
    """
    text = None
    if has_norms and not plan.is_full:
        text = NOT_CALIBRATED if calibrated is None else calibrated.calibration_warning(plan)
    return plan if plan.warning == text else replace(plan, warning=text)
