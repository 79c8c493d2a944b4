"""Batch normalisation statistics of any size, in numpy: what `calibration.Statistics` is where there is PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decomposable.edge.arrays import Array
from decomposable.edge.source import Stored
from decomposable.sizing.interpolation import CalibratedSizes
from decomposable.sizing.plans import RankPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics(CalibratedSizes):
    """Mean and variance of all batch normalisation channels for calibrated sizes, in numpy."""

    mean_SC: Array | Stored  # a row of each is needed at a time
    var_SC: Array | Stored
    original: tuple[Array, Array]

    def at(self, plan: RankPlan) -> dict[str, Array]:
        """The statistics of a size by the names of their tensors; empty for a full size that keeps the original's."""
        found = self.between(plan)
        if found is None:
            return {}
        ends = [self._row(row) for row in (found.lower, found.upper)]
        cuts = np.cumsum(self.channels)[:-1]
        tensors = {}
        for kind, low, high in zip(("running_mean", "running_var"), *ends, strict=True):
            values_C = low + (high.astype(np.float64) - low) * found.place_C
            for name, values in zip(self.names, np.split(values_C.astype(low.dtype), cuts), strict=True):
                tensors[f"{name}.{kind}" if name else kind] = values
        return tensors
