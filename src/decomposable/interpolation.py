"""Between which calibrated sizes a size lies, and where. numpy only: a device without torch uses the same code.

What matters most for a normalisation layer is the rank of the layer that feeds it, so its place between the two
neighbours is that of this rank, and only where both neighbours have the same rank is it that of the network as a whole.
(Interpolating all layers alike loses up to 12 points where some layer becomes dense between the neighbours.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decomposable.ranks import RankPlan


@dataclass(frozen=True, eq=False)
class Between:
    """Two rows of calibrated sizes, and for every channel how far it is from the lower one to the upper one, 0 to 1.

    The row behind the last one is the original network.
    """

    lower: int
    upper: int
    place_C: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibratedSizes:
    """The sizes that normalisation layers were calibrated for, smallest first, and what their channels belong to."""

    names: tuple[str, ...]
    channels: tuple[int, ...]
    feeders: tuple[str | None, ...]  # the decomposed layer whose output each normalises, if there is one
    positions: tuple[float, ...]  # of the sizes, ascending: their part of the original's MACs (or parameters)
    plans: tuple[RankPlan, ...]
    has_explicit_full: bool
    full_plan: RankPlan

    def between(self, plan: RankPlan) -> Between | None:
        """Where a size lies; None for a full size that keeps the original's statistics."""
        if plan.is_full and not self.has_explicit_full:
            return None
        nowhere = np.zeros(sum(self.channels))
        for row, calibrated in enumerate(self.plans):
            if calibrated.ranks == plan.ranks:
                return Between(row, row, nowhere)
        upper = int(np.searchsorted(self.positions, position(plan)))
        if upper == 0:
            return Between(0, 0, nowhere)
        below, above = (self.full_plan if i == len(self.plans) else self.plans[i] for i in (upper - 1, upper))
        places = [_place(plan, below, above, feeder) for feeder in self.feeders]
        return Between(upper - 1, upper, np.repeat(places, self.channels))


def _place(plan: RankPlan, below: RankPlan, above: RankPlan, feeder: str | None) -> float:
    """How far from one calibrated size to the next a normalisation layer of this plan is, from 0 to 1."""
    if feeder is not None:
        low, high = below.ranks[feeder], above.ranks[feeder]
        if low != high:
            return float(np.clip((plan.ranks[feeder] - low) / (high - low), 0, 1))
    width = position(above) - position(below)
    return float(np.clip((position(plan) - position(below)) / width, 0, 1)) if width > 0 else 1.0


def position(plan: RankPlan) -> float:
    """Where a size lies between nothing and the original."""
    return plan.params_fraction if plan.macs_fraction is None else plan.macs_fraction
