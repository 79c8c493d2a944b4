"""Multiply-accumulates (MACs) and parameters of a layer by formula, and where dense is cheaper than a chain.

The convention is the paper's: a weight counts once for every output position it is applied to, per sample (in a
transposed convolution for every input position). Biases, normalisation, activations and pooling count nothing. Products
of two activations, as inside attention, have no weight and cost the same at every size (`core/products.py` finds them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from decomposable_edge.sizing.chain import Axes, Chain, Rank, Ranks, price, ranks_of, stages_named

# Both were fitted to what `benchmarks/break_even.py` measured on a CPU, forward and backward together.
CHAIN_LOSS = 1.15  # how much slower a multiply-accumulate is in the thin layers of a chain than in the dense one
TRAFFIC = 64  # multiply-accumulates that a machine does in the time it moves one activation to or from memory


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A decomposed weight without its values: its name, form, stages, and its shape (outputs, inputs, kernel)."""

    name: str
    form: str  # tells the stages only where `stages_named` says so
    shape: tuple[int, ...]
    stages: tuple[Axes, ...] = ()
    transposed: bool = False

    def __post_init__(self) -> None:
        stages = self.stages or stages_named(self.form, len(self.shape) - 2)
        assert stages is not None, f"a layer of the form {self.form!r} has stages"
        object.__setattr__(self, "stages", stages)

    @property
    def chain(self) -> Chain:
        """Return the chain that the weight becomes."""
        return Chain(self.shape, self.stages, self.transposed)

    @property
    def full_rank(self) -> Rank:
        """Return the most bases that a weight of this shape can have."""
        return self.chain.full_rank


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one decomposed layer costs: dense, or as a chain at some ranks.

    With one cut, the cost per rank is one number. With several cuts it is one number for every stage, per unit of the
    ranks before and behind it, because the price of a basis depends on the rank of the next cut.
    """

    name: str
    full_rank: Rank
    dense_macs: int
    macs_per_rank: int | tuple[int, ...]
    dense_params: int
    params_per_rank: int | tuple[int, ...]

    @classmethod
    def of(cls, layer: LayerShape, *, dense_macs: int, macs_per_rank: int | tuple[int, ...]) -> LayerCost:
        """Return the cost of a layer; its parameters follow from its shape."""
        chain = layer.chain
        return cls(
            name=layer.name,
            full_rank=chain.full_rank,
            dense_macs=dense_macs,
            macs_per_rank=macs_per_rank,
            dense_params=chain.dense_size,
            params_per_rank=per_rank(chain.sizes),
        )

    @property
    def full_ranks(self) -> Ranks:
        """Return the full rank of every cut."""
        return ranks_of(self.full_rank)

    def dense(self, measure: str) -> int:
        """Return what the dense layer costs by a measure, "macs" or "params"."""
        return self.dense_params if measure == "params" else self.dense_macs

    def chain(self, measure: str, ranks: Sequence[int]) -> int:
        """Return what the chain costs at these ranks; with arrays of ranks an array."""
        each = self.params_per_rank if measure == "params" else self.macs_per_rank
        return price(each, ranks) if isinstance(each, tuple) else each * ranks[0]

    def macs(self, rank: Rank, dense: bool) -> int:
        """Return the MACs for one sample, run as one dense layer or as a chain."""
        return self.dense_macs if dense else self.chain("macs", ranks_of(rank))

    def params(self, rank: Rank, dense: bool) -> int:
        """Return the parameters of the weight, without biases."""
        return self.dense_params if dense else self.chain("params", ranks_of(rank))


def per_rank(per_stage: Sequence[int]) -> int | tuple[int, ...]:
    """Return what stages cost per rank, as `LayerCost` has it: with one cut all of them together.

    >>> per_rank((10, 1)), per_rank((10, 1, 100))
    (11, (10, 1, 100))
    """
    return sum(per_stage) if len(per_stage) == 2 else tuple(per_stage)


@dataclass(frozen=True, kw_only=True)
class LeftAlone:
    """What a part of the network that is not decomposed costs at every size."""

    name: str
    macs: int
    params: int


def chain_is_faster(chain: Chain, ranks: Sequence[int], *, inputs: int, maps: Sequence[int], samples: int) -> bool:
    """Return whether a training pass is faster through a chain than through a dense W̃ made from its stages.

    A chain needs fewer MACs, but also writes and reads a map with as many channels as each cut has bases. On narrow
    layers that costs more than the multiplications saved:

        time ∝ MACs · (CHAIN_LOSS for the chain) + TRAFFIC · activations moved.

    `inputs` and `maps` are the positions per sample of the input and of the map behind every stage. The dense layer
    pays for making W̃ once. The rule depends on shapes only, so that a run repeats exactly on any machine.
    """
    moved = chain.shape[1] * inputs + chain.shape[0] * maps[-1]
    applied = (inputs, *maps[:-1]) if chain.transposed else maps
    macs = price([size * positions for size, positions in zip(chain.sizes, applied, strict=True)], ranks)
    between = sum(rank * positions for rank, positions in zip(ranks, maps, strict=False))
    as_chain = samples * (CHAIN_LOSS * macs + TRAFFIC * (moved + 2 * between))
    at = inputs if chain.transposed else maps[-1]
    return as_chain < samples * (chain.dense_size * at + TRAFFIC * moved) + _macs_of_product(chain, ranks)


def _macs_of_product(chain: Chain, ranks: Sequence[int]) -> int:
    """Return the MACs of making W̃ from its stages, one after the other."""
    areas, ends = [math.prod(kernel) for kernel in chain.kernels], (*ranks, chain.shape[0])
    return sum(ends[i] * ends[i - 1] * chain.shape[1] * math.prod(areas[: i + 1]) for i in range(1, len(areas)))
