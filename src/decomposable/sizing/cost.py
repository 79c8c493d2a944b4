"""Multiply-accumulates (MACs) and parameters of a layer by formula, and where dense is cheaper than two factors.

The convention is the paper's: a weight counts once for every output position it is applied to, per sample; biases,
normalisation, activations, pooling and the products inside attention count nothing. For the spatial form the first
factor runs before the vertical stride, so its positions are input height × output width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Both were fitted to what `benchmarks/break_even.py` measured on a CPU, forward and backward together.
TWO_LAYER_LOSS = 1.15  # how much slower a multiply-accumulate is in the two thin layers than in the dense one
TRAFFIC = 64  # multiply-accumulates that a machine does in the time it moves one activation to or from memory


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A decomposed weight without its values: its name, its form, and its shape as a dense layer."""

    name: str
    form: str
    shape: tuple[int, ...]

    @property
    def full_rank(self) -> int:
        """The most bases that a weight of this shape can have."""
        return min(factor_sizes(self.shape, self.form))

    def factor_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of its two factors with so many bases.

        >>> LayerShape(name="conv", form="spatial", shape=(8, 4, 3, 5)).factor_shapes(2)
        ((2, 4, 1, 5), (8, 2, 3, 1))
        >>> LayerShape(name="conv", form="channel", shape=(8, 4, 3, 5)).factor_shapes(2)
        ((2, 4, 3, 5), (8, 2, 1, 1))
        """
        out_channels, in_channels, *kernel = self.shape
        if self.form == "spatial":
            return (rank, in_channels, 1, kernel[1]), (out_channels, rank, kernel[0], 1)
        return (rank, in_channels, *kernel), (out_channels, rank, *(1 for _ in kernel))


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one decomposed layer costs: dense, or with two factors of some rank."""

    name: str
    full_rank: int
    dense_macs: int
    macs_per_rank: int
    dense_params: int
    params_per_rank: int

    @classmethod
    def of(cls, layer: LayerShape, *, dense_macs: int, macs_per_rank: int) -> LayerCost:
        """That of a layer; its parameters follow from its shape."""
        return cls(
            name=layer.name,
            full_rank=layer.full_rank,
            dense_macs=dense_macs,
            macs_per_rank=macs_per_rank,
            dense_params=dense_size(layer.shape),
            params_per_rank=sum(factor_sizes(layer.shape, layer.form)),
        )

    def macs(self, rank: int, dense: bool) -> int:
        """MACs for one sample, run as one dense layer or as two factors."""
        return self.dense_macs if dense else rank * self.macs_per_rank

    def params(self, rank: int, dense: bool) -> int:
        """Parameters of the weight, biases not included."""
        return self.dense_params if dense else rank * self.params_per_rank


@dataclass(frozen=True, kw_only=True)
class LeftAlone:
    """What a part of the network that is not decomposed costs at every size."""

    name: str
    macs: int
    params: int


def factor_sizes(shape: Sequence[int], form: str) -> tuple[int, int]:
    """Weights per basis of the first and of the second factor.

    >>> factor_sizes((8, 4, 3, 5), "channel"), factor_sizes((8, 4, 3, 5), "spatial"), factor_sizes((10, 64), "channel")
    ((60, 8), (20, 24), (64, 10))
    """
    out_channels, in_channels, *kernel = shape
    height, width = kernel or (1, 1)
    if form == "spatial":
        return in_channels * width, out_channels * height
    return in_channels * height * width, out_channels


def forms_of(shape: Sequence[int]) -> tuple[str, ...]:
    """The forms that a weight of this shape can have: 1×1 kernels and linear layers have nothing spatial to split."""
    return ("channel",) if all(size == 1 for size in shape[2:]) else ("channel", "spatial")


def dense_size(shape: Sequence[int]) -> int:
    """Weights of the dense layer."""
    return math.prod(shape)


def two_factors_are_faster(
    shape: Sequence[int], form: str, rank: int, *, inputs: int, between: int, outputs: int, samples: int
) -> bool:
    """Whether a training pass is faster through two factors than through a dense W̃ made from them.

    A count of MACs alone says so up to a rank of MN/(M+N), but the two factors also write and read a map of `rank`
    channels in between, which on narrow layers costs more than the multiplications saved:

        time ∝ MACs · (TWO_LAYER_LOSS for the factors) + TRAFFIC · activations moved.

    `inputs`, `between` and `outputs` are the positions per sample of the three maps. The dense layer pays for making
    W̃ = P Q once. The rule depends on shapes only, so that a run repeats exactly on any machine.
    """
    first, second = factor_sizes(shape, form)
    out_channels, in_channels = shape[0], shape[1]
    moved = in_channels * inputs + out_channels * outputs
    factor_macs = rank * (first * between + second * outputs)
    two = samples * (TWO_LAYER_LOSS * factor_macs + TRAFFIC * (moved + 2 * rank * between))
    dense = samples * (dense_size(shape) * outputs + TRAFFIC * moved) + dense_size(shape) * rank
    return two < dense
