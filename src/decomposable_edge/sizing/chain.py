"""A decomposed layer is a chain of plain layers; between two neighbours lies a cut, whose rank can be chosen.

    x ── stage 0 ──┆── stage 1 ──┆── … ──┆── stage n ── y          channels  I → r₁ → r₂ → … → rₙ → O
                  r₁            r₂      rₙ

Every axis of the layer's kernel belongs to one stage, which has the axis' size, stride, padding and dilation. Along all
other axes a stage is 1 wide. Shapes, costs, ranks and slices follow from this alone. numpy only, for devices.

In the chain of a transposed convolution, the stages that have an axis are transposed convolutions. Weights are always
given as (outputs, inputs, kernel); a transposed convolution *holds* its weight as (inputs, outputs, kernel).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from decomposable_edge.checks import is_integer
from decomposable_edge.fields import require

Axes = tuple[bool, ...]
"""Which axes of the kernel a stage has."""

Ranks = tuple[int, ...]
"""One number for each cut of a layer."""

Rank = int | Ranks
"""The same as users see it: an int for a layer with a single cut, a tuple for one with several."""

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
"""What the stages of a chain are called in files, in order; no chain is longer."""

Weight = TypeVar("Weight", bound=Any)  # a tensor of torch, or an array of numpy

_WORDS = ("two", "three", "four", "five", "six", "seven", "eight")


def ranks_of(rank: Rank) -> Ranks:
    """Return one number for each cut.

    >>> ranks_of(3), ranks_of((3, 4))
    ((3,), (3, 4))
    """
    return rank if isinstance(rank, tuple) else (rank,)


def rank_of(ranks: Sequence[int]) -> Rank:
    """Return the ranks of a layer as users see them."""
    return ranks[0] if len(ranks) == 1 else tuple(ranks)


def flat_ranks(ranks: Mapping[str, Rank]) -> Ranks:
    """Return the ranks of all layers, cut by cut, in order."""
    return tuple(each for rank in ranks.values() for each in ranks_of(rank))


def like_ranks(ranks: Mapping[str, Rank], flat: Iterable[int]) -> dict[str, Rank]:
    """Return numbers for all cuts by layer: the other way round, for the layers of `ranks`.

    >>> like_ranks({"a": 1, "b": (1, 2)}, [3, 4, 5])
    {'a': 3, 'b': (4, 5)}
    """
    numbers = iter(flat)
    return {name: rank_of([next(numbers) for _ in ranks_of(rank)]) for name, rank in ranks.items()}


def is_rank(rank: object, full: Rank) -> bool:
    """Return whether something can be the rank of a layer with this full rank: an int, or for several cuts a list.

    >>> is_rank(3, 4), is_rank([3, 9], (4, 8))
    (True, False)
    """
    if isinstance(full, int):
        return is_integer(rank) and 1 <= rank <= full
    is_list = isinstance(rank, tuple | list) and len(rank) == len(full)
    return is_list and all(map(is_rank, rank, full))  # type: ignore[call-overload]


def in_words(rank: Rank) -> str:
    """Return what a layer with these ranks consists of.

    >>> in_words(3), in_words((3, 4))
    ('two factors', 'three factors')
    """
    return f"{_WORDS[len(ranks_of(rank)) - 1]} factors"


def stages_named(form: str, axes: int) -> tuple[Axes, ...] | None:
    """Return the stages of a form that files give by name alone; None for other forms, whose stages files list.

    >>> stages_named("spatial", 2), stages_named("channel", 1)
    (((False, True), (True, False)), ((True,), (False,)))
    """
    if form == "spatial" and axes == 2:
        return (False, True), (True, False)
    return ((True,) * axes, (False,) * axes) if form == "channel" else None


def price(per_stage: Sequence[int], ranks: Sequence[int]) -> int:
    """Return what all stages cost together; `per_stage` is the cost per unit of the ranks before and behind each.

    It never falls as a rank grows. With arrays of ranks it is an array.

    >>> price((10, 1), (3,)), price((10, 1, 100), (2, 3))
    (33, 326)
    """
    ends = (1, *ranks, 1)
    return sum(cost * ends[i] * ends[i + 1] for i, cost in enumerate(per_stage))


@dataclass(frozen=True)
class Chain:
    """The chain that a dense weight of a shape (O, I, *kernel) becomes: which axes of the kernel each stage has.

    >>> chain = Chain((8, 4, 3, 5), ((False, True), (True, False)))
    >>> chain.shapes((2,)), chain.full_ranks, chain.sizes
    (((2, 4, 1, 5), (8, 2, 3, 1)), (20,), (20, 24))
    >>> Chain((8, 4, 3, 5), ((False, False), (True, True), (False, False))).shapes((2, 6))
    ((2, 4, 1, 1), (6, 2, 3, 5), (8, 6, 1, 1))
    """

    shape: tuple[int, ...]
    stages: tuple[Axes, ...]
    transposed: bool = False

    @cached_property
    def swapped(self) -> tuple[bool, ...]:
        """Return which stages hold their weight as (inputs, outputs, kernel)."""
        return tuple(self.transposed and any(axes) for axes in self.stages)

    @cached_property
    def kernels(self) -> tuple[tuple[int, ...], ...]:
        """Return the kernel of every stage."""
        kernel = self.shape[2:]
        return tuple(tuple(size if own else 1 for size, own in zip(kernel, axes, strict=True)) for axes in self.stages)

    @cached_property
    def full_ranks(self) -> Ranks:
        """Return the most bases that each cut can have: the entries of its smaller side."""
        areas = [math.prod(kernel) for kernel in self.kernels]
        outputs, inputs = self.shape[:2]
        return tuple(
            min(inputs * math.prod(areas[:cut]), outputs * math.prod(areas[cut:])) for cut in range(1, len(areas))
        )

    @property
    def full_rank(self) -> Rank:
        """Return the full ranks as users see them."""
        return rank_of(self.full_ranks)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Weights of every stage per unit of the ranks before and behind it."""
        return tuple(math.prod(shape) for shape in self.shapes((1,) * len(self.full_ranks)))

    @property
    def dense_size(self) -> int:
        """Weights of the dense layer."""
        return math.prod(self.shape)

    def shapes(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of all stages' weights at these ranks."""
        ends = (self.shape[1], *ranks, self.shape[0])
        return tuple((ends[i + 1], ends[i], *kernel) for i, kernel in enumerate(self.kernels))

    def held(self, weights: Sequence[Weight]) -> tuple[Weight, ...]:
        """Return the stages' weights as the layers hold them; or held weights the other way round."""
        return tuple(w.swapaxes(0, 1) if s else w for w, s in zip(weights, self.swapped, strict=True))

    def held_dense(self, weight: Weight) -> Weight:
        """Return the dense weight as its layer holds it, or the other way round."""
        return weight.swapaxes(0, 1) if self.transposed else weight

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Return the shape of the dense weight as its layer holds it."""
        outputs, inputs, *kernel = self.shape
        return (inputs, outputs, *kernel) if self.transposed else self.shape

    def applied(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[int, ...]:
        """Return at how many positions the weight of every stage is applied: those of the map behind it.

        A transposed convolution's weight is applied at the positions of the map before it.

        >>> Chain((8, 4, 2, 2), ((False, False), (True, True)), transposed=True).applied((5, 6), (10, 12))
        (30, 30)
        """
        behind = self.positions(inputs, outputs)
        return (math.prod(inputs), *behind[:-1]) if self.transposed else behind

    def positions(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[int, ...]:
        """Return how many positions the map behind every stage has, from the extents of the layer's input and output.

        Once a stage has had an axis, the extent along it is that of the output.

        >>> Chain((8, 4, 3, 5), ((False, True), (True, False))).positions((10, 20), (5, 6))
        (60, 30)
        """
        extents, found = list(inputs), []
        for axes in self.stages:
            extents = [out if own else before for out, own, before in zip(outputs, axes, extents, strict=True)]
            found.append(math.prod(extents))
        return tuple(found)


def check_chain(where: str, shape: tuple[int, ...], stages: tuple[Axes, ...]) -> None:
    """Refuse stages of a file that no chain for such a weight has."""
    axes = len(shape) - 2
    is_chain = 2 <= len(stages) <= len(ORDINALS) and all(len(each) == axes for each in stages)
    is_chain = is_chain and all(sum(each[i] for each in stages) == 1 for i in range(axes))
    require(is_chain, f"layer '{where:.60}' of shape {shape} has the stages {stages!r:.80}")
