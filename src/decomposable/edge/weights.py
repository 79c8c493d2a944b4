"""The weights of a size, in numpy: slices of factors or one dense weight, statistics, and what normalisation becomes.

`core/forms.py` has the forms, `network/calibration` the statistics where there is PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from decomposable.edge.source import Array, Stored
from decomposable.locks import ForkLock
from decomposable.sizing.cost import LayerShape
from decomposable.sizing.interpolation import CalibratedSizes, KnownSizes, TunedSizes
from decomposable.sizing.plans import RankPlan


def dense_weight(first: Array, second: Array, form: str) -> Array:
    """W̃ that two factors stand for."""
    exact = np.float32 if first.dtype == np.float16 else first.dtype  # numpy is slow and coarse in half precision
    rank, out_channels = first.shape[0], second.shape[0]
    left = first.reshape(rank, -1).astype(exact, copy=False)
    if form == "spatial":
        height, (in_channels, width) = second.shape[2], (first.shape[1], first.shape[3])
        right = second[..., 0].swapaxes(1, 2).reshape(out_channels * height, rank).astype(exact, copy=False)
        w_OHIW = (right @ left).reshape(out_channels, height, in_channels, width)
        return np.ascontiguousarray(w_OHIW.swapaxes(1, 2), dtype=first.dtype)
    right = second.reshape(out_channels, rank).astype(exact, copy=False)
    return (right @ left).reshape(out_channels, *first.shape[1:]).astype(first.dtype, copy=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights(LayerShape):
    """All bases of one layer, which lie in the file; those of the largest size that was taken are in memory.

    The dense weight is computed when it is first needed, and kept. A layer that only training uses has shapes, which
    say how many bases there are, but no weights.
    """

    first: Array | Stored
    second: Array | Stored
    is_used: bool = True
    _read: list[tuple[Array, Array]] = field(default_factory=list)
    _kept: dict[int, Array] = field(default_factory=dict)
    _lock: ForkLock = field(default_factory=ForkLock)

    @property
    def stored(self) -> int:
        """How many bases there are."""
        return len(self.first)

    def pair(self, rank: int) -> tuple[Array, Array]:
        """The first r bases, as views of those that are in memory; more are read where these are too few."""
        with self._lock:
            if not self._read or len(self._read[0][0]) < rank:
                self._read.clear()  # before the larger ones are read
                self._read.append((self.first[:rank], self.second[:, :rank]))
            first, second = self._read[0]
        return first[:rank], second[:, :rank]

    def dense(self, rank: int, *, keep: bool) -> Array:
        """W̃ of the first r bases; with `keep`, it is there at once the next time."""
        with self._lock:
            if rank in self._kept:
                return self._kept[rank]
            is_read = bool(self._read) and len(self._read[0][0]) >= rank
            pair = self.pair(rank) if is_read else (self.first[:rank], self.second[:, :rank])  # not needed any more
            weight = dense_weight(*pair, self.form)
            if keep:
                self._kept.clear()  # one per layer: memory is scarce where this runs
                self._kept[rank] = weight
            return weight


@dataclass(frozen=True, kw_only=True, eq=False)
class InNumpy(KnownSizes):
    """What is known of sizes, as arrays: of each table, which may lie in the file, two rows are needed at a time."""

    original: tuple[Array, ...]

    def interpolated(self, plan: RankPlan) -> list[dict[str, Array]]:
        """What each table has for this size, by name; nothing for a full size that keeps what the original has."""
        found = self.between(plan)
        if found is None:
            return [{} for _ in self.tables]
        cuts, tables = np.cumsum(self.channels)[:-1], []
        for low, high in zip(self._row(found.lower), self._row(found.upper), strict=True):
            values_C = low + (high.astype(np.float64) - low) * found.place_C
            tables.append(dict(zip(self.names, np.split(values_C.astype(low.dtype), cuts), strict=True)))
        return tables


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics(InNumpy, CalibratedSizes):
    """Mean and variance of all batch normalisation channels for calibrated sizes."""

    mean_SC: Array | Stored
    var_SC: Array | Stored

    def at(self, plan: RankPlan) -> dict[str, Array]:
        """The statistics of a size by the names of their tensors; empty for a full size that keeps the original's."""
        return {
            f"{name}.{kind}" if name else kind: values
            for kind, table in zip(("running_mean", "running_var"), self.interpolated(plan), strict=True)
            for name, values in table.items()
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned(InNumpy, TunedSizes):
    """Scales, shifts and biases of tuned sizes, by the names of their tensors."""

    values_ST: Array | Stored

    def at(self, plan: RankPlan) -> dict[str, Array]:
        """Those of a size, end to end each; empty for the full one, which keeps the original's."""
        return self.interpolated(plan)[0]


def folded(
    weight: Array, bias: Array | None, gamma: Array, beta: Array, mean: Array, var: Array, *, epsilon: float
) -> tuple[Array, Array]:
    """Weight and bias of a layer that takes in the batch normalisation behind it, whose numbers are one per channel.

    BN(Wx + b) = s·(Wx + b − mean) + β = (s·W)x + (s·(b − mean) + β),  s = γ/√(var + ε); output channels lie along the
    weight's first axis.

    >>> norm = {"gamma": np.ones(1), "beta": np.ones(1), "mean": np.full(1, 2.0), "var": np.full(1, 0.25)}
    >>> weight, bias = folded(np.array([[3.0]]), None, **norm, epsilon=0.0)  # 3x → (3x − 2) / 0.5 + 1
    >>> weight.tolist(), bias.tolist()
    ([[6.0]], [-3.0])
    """
    with np.errstate(all="ignore"):  # what is no number stays none, as in the network itself
        scale = gamma / np.sqrt(var.astype(np.float64) + epsilon)
        shift = beta - mean * scale
        if bias is not None:
            shift = shift + bias * scale
        along_outputs = scale.astype(weight.dtype).reshape(-1, *(1,) * (weight.ndim - 1))
        return np.ascontiguousarray(weight * along_outputs), shift.astype(weight.dtype)
