"""The weights of a layer in numpy, read from a file as far as they are needed; and what normalisation becomes.

`core/standin.py` makes W̃ of a chain, `network/calibration` the statistics where there is PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decomposable_edge.file.container import Array, Stored
from decomposable_edge.locks import ForkLock
from decomposable_edge.sizing.chain import Ranks
from decomposable_edge.sizing.cost import LayerShape
from decomposable_edge.sizing.interpolation import CalibratedSizes, KnownSizes, TunedSizes
from decomposable_edge.sizing.record import factor_names


def dense_weight(stages: Sequence[Array]) -> Array:
    """Return W̃ that the stages of a chain stand for: along every axis of the kernel, one of them has the taps."""
    own = stages[0].dtype
    exact = np.float32 if own == np.float16 else own  # numpy is slow and coarse in half precision
    made = stages[0].astype(exact, copy=False)
    for stage in stages[1:]:
        made = _joined(made, stage.astype(exact, copy=False))
    return np.ascontiguousarray(made, dtype=own)


def _joined(before: Array, behind: Array) -> Array:
    """Return one weight for two layers, of which one follows the other."""
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
    """The weight and the factors of one layer, which lie in the file: `realising.Bases` in numpy.

    Those of the largest size that was taken are in memory, and so is the dense weight once it was taken.
    """

    stages_stored: tuple[Stored[Array], ...]  # bases first
    dense_stored: Stored[Array]
    is_used: bool = True  # a layer that only training uses is not in the graph
    _read: list[tuple[Array, ...]] = field(default_factory=list)
    _dense: list[Array] = field(default_factory=list)
    _lock: ForkLock = field(default_factory=ForkLock)

    @property
    def names(self) -> tuple[str, ...]:
        """What its stages are called in the graph."""
        return factor_names(self)

    @property
    def kept(self) -> Ranks:
        """How many bases of every cut there are."""
        return tuple(map(len, self.stages_stored[:-1]))

    def weight(self) -> Array:
        """Return the dense weight, as the layer holds it."""
        with self._lock:
            if not self._dense:
                self._dense.append(self.dense_stored.all())
            return self._dense[0]

    def first(self, ranks: Ranks) -> tuple[Array, ...]:
        """Return the first bases, as views of those that are in memory; more are read where these are too few."""
        with self._lock:
            known = tuple(map(len, self._read[0][:-1])) if self._read else (0,) * len(ranks)
            if any(wanted > there for wanted, there in zip(ranks, known, strict=True)):
                self._read.clear()  # before the larger ones are read
                self._read.append(self._from_file(tuple(map(max, ranks, known))))
            return _sliced(self._read[0], ranks)

    def beyond(self, rank: int) -> tuple[Array, ...]:
        """Return the two stages with all bases but so many."""
        first, second = self.stages_stored
        return first[rank:], second[rank:].swapaxes(0, 1)

    def joined(self, factors: tuple[Array, ...]) -> Array:
        """Return the dense weight that stages stand for, as the layer holds it."""
        return np.ascontiguousarray(self.chain.held_dense(dense_weight(factors)))

    def held(self, factors: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return the weights of stages as their layers hold them."""
        return self.chain.held(factors)

    def _from_file(self, ranks: Ranks) -> tuple[Array, ...]:
        """Return so many bases, each stage in the order of memory in which its layer holds it."""
        rows = [stored[:rank] for stored, rank in zip(self.stages_stored, (*ranks, ranks[-1]), strict=True)]
        parts = _sliced((*rows[:-1], rows[-1].swapaxes(0, 1)), ranks)
        held = [np.ascontiguousarray(part) for part in self.held(parts)]
        for each in held:
            each.flags.writeable = False
        return self.chain.held(held)


def _sliced(weights: Sequence[Array], ranks: Ranks) -> tuple[Array, ...]:
    """Return the first bases of every cut: outputs of the stage before it, and inputs of the one behind."""
    ends = (None, *ranks, None)
    return tuple(weight[: ends[i + 1], : ends[i]] for i, weight in enumerate(weights))


class InNumpy(KnownSizes):
    """What is known of sizes, as arrays: of each table, which lies in the file, two rows are needed at a time."""

    def _mixed(self, low: Array, high: Array, place_C: Array) -> Sequence[Array]:
        values_C = low + (high.astype(np.float64) - low) * place_C
        return np.split(values_C.astype(low.dtype), np.cumsum(self.channels)[:-1])


class Statistics(InNumpy, CalibratedSizes):
    """Mean and variance of all batch normalisation channels for calibrated sizes."""


class Tuned(InNumpy, TunedSizes):
    """Scales, shifts and biases of tuned sizes, by the names of their tensors."""


def folded(
    weight: Array, bias: Array | None, gamma: Array, beta: Array, mean: Any, var: Any, *, epsilon: float, axis: int = 0
) -> tuple[Array, Array]:
    """Return weight and bias of a layer that takes in the batch normalisation behind it, with a number per channel.

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
