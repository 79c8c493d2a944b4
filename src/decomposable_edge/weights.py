"""The weights of a size, in numpy: slices of factors or one dense weight, statistics, and what normalisation becomes.

`core/standin.py` makes W̃ of a chain, `network/calibration` the statistics where there is PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from decomposable_edge.graph import factor_names
from decomposable_edge.locks import ForkLock
from decomposable_edge.sizing.chain import Ranks
from decomposable_edge.sizing.cost import LayerShape
from decomposable_edge.sizing.interpolation import CalibratedSizes, KnownSizes, TunedSizes
from decomposable_edge.sizing.plans import RankPlan
from decomposable_edge.source import Array, Stored


def dense_weight(stages: Sequence[Array]) -> Array:
    """W̃ that the stages of a chain stand for: along every axis of the kernel, one of them has the taps."""
    exact = (
        np.float32 if stages[0].dtype == np.float16 else stages[0].dtype
    )  # numpy is slow and coarse in half precision
    made = stages[0].astype(exact, copy=False)
    for stage in stages[1:]:
        made = _joined(made, stage.astype(exact, copy=False))
    return np.ascontiguousarray(made, dtype=stages[0].dtype)


def _joined(before: Array, behind: Array) -> Array:
    """One weight for two layers, of which one follows the other."""
    rank, inputs, *taps_before = before.shape
    outputs, _, *taps_behind = behind.shape
    left = np.moveaxis(behind, 1, -1).reshape(-1, rank)
    apart = (left @ before.reshape(rank, -1)).reshape(outputs, *taps_behind, inputs, *taps_before)
    axes = len(taps_before)
    pairs = [axis for i in range(axes) for axis in (1 + i, 2 + axes + i)]  # one of each two is 1 wide
    kernel = [one * other for one, other in zip(taps_before, taps_behind, strict=True)]
    return apart.transpose(0, 1 + axes, *pairs).reshape(outputs, inputs, *kernel)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights(LayerShape):
    """All bases of one layer, which lie in the file; those of the largest size that was taken are in memory.

    The dense weight is computed when it is first needed, and kept. A layer that only training uses has shapes, which
    say how many bases there are, but no weights.
    """

    weights: tuple[Array | Stored, ...]  # of its stages
    is_used: bool = True
    _read: list[tuple[Array, ...]] = field(default_factory=list)
    _kept: dict[Ranks, Array] = field(default_factory=dict)
    _lock: ForkLock = field(default_factory=ForkLock)

    @property
    def names(self) -> tuple[str, ...]:
        """What its stages are called in the graph."""
        return factor_names(self.name, len(self.stages))

    @property
    def stored(self) -> Ranks:
        """How many bases there are."""
        return self._ranks(self.weights)

    def slices(self, ranks: Ranks) -> tuple[Array, ...]:
        """The first bases, as views of those that are in memory; more are read where these are too few."""
        with self._lock:
            known = self._ranks_read
            if any(wanted > there for wanted, there in zip(ranks, known, strict=True)):
                self._read.clear()  # before the larger ones are read
                self._read.append(_sliced(self.weights, tuple(map(max, ranks, known)), self.chain.swapped))
            return _sliced(self._read[0], ranks, self.chain.swapped)

    @property
    def _ranks_read(self) -> Ranks:
        """How many bases of every cut are in memory."""
        return self._ranks(self._read[0]) if self._read else (0,) * len(self.stored)

    def _ranks(self, weights: Sequence[Array | Stored]) -> Ranks:
        """How many bases of every cut these are."""
        pairs = zip(weights[:-1], self.chain.swapped, strict=False)
        return tuple(weight.shape[1 if is_swapped else 0] for weight, is_swapped in pairs)

    def dense(self, ranks: Ranks, *, keep: bool) -> Array:
        """W̃ of the first bases; with `keep`, it is there at once the next time."""
        with self._lock:
            if ranks in self._kept:
                return self._kept[ranks]
            is_read = all(wanted <= there for wanted, there in zip(ranks, self._ranks_read, strict=True))
            parts = self.slices(ranks) if is_read else _sliced(self.weights, ranks, self.chain.swapped)
            weight = np.ascontiguousarray(self.chain.held_dense(dense_weight(self.chain.held(parts))))
            del parts  # not needed any more
            if keep:
                self._kept.clear()  # one per layer: memory is scarce where this runs
                self._kept[ranks] = weight
            return weight


def _sliced(weights: Sequence[Array | Stored], ranks: Ranks, swapped: Sequence[bool]) -> tuple[Array, ...]:
    """The first bases of every cut: those of the outputs of the stage before it, and of the inputs of the one behind.

    Outputs lie along the first axis of a weight and inputs along the second; where they are swapped, inputs come first.
    """
    ends, made = (None, *ranks, None), []
    for i, (weight, is_swapped) in enumerate(zip(weights, swapped, strict=True)):
        first, second = (ends[i], ends[i + 1]) if is_swapped else (ends[i + 1], ends[i])
        part: Array = weight[:, :second] if first is None else weight[:first]
        made.append(part if first is None or second is None else part[:, :second])
    return tuple(made)


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
    weight: Array,
    bias: Array | None,
    gamma: Array,
    beta: Array,
    mean: Array,
    var: Array,
    *,
    epsilon: float,
    axis: int = 0,
) -> tuple[Array, Array]:
    """Weight and bias of a layer that takes in the batch normalisation behind it, whose numbers are one per channel.

    BN(Wx + b) = s·(Wx + b − mean) + β = (s·W)x + (s·(b − mean) + β),  s = γ/√(var + ε); output channels lie along
    this axis of the weight.

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
        along_outputs = scale.astype(weight.dtype).reshape(-1, *(1,) * (weight.ndim - 1 - axis))
        return np.ascontiguousarray(weight * along_outputs), shift.astype(weight.dtype)
