"""A decomposed layer is a chain of plain layers; between two neighbours lies a cut, whose rank can be chosen.

    x ── stage 0 ──┆── stage 1 ──┆── … ──┆── stage n ── y          channels  I → r₁ → r₂ → … → rₙ → O
                  r₁            r₂      rₙ

Every axis of the layer's kernel belongs to one stage, which has the axis' size, stride, padding and dilation; along all
other axes a stage is 1 wide. This is all that is known of a layer here: shapes, costs, ranks and slices follow from it.
numpy only: a device without torch uses the same code.

In the chain of a transposed convolution those stages are transposed convolutions that have an axis. Weights are spoken
of as (outputs, inputs, kernel) all the same; a transposed convolution *holds* them as (inputs, outputs, kernel).

Ranks are one number for each cut. Where they are shown to users, those of a layer with a single cut are an int, and
those of a layer with several a tuple: a `Rank`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

from decomposable_edge.checks import is_integer
from decomposable_edge.fields import require

Axes = tuple[bool, ...]
"""Which axes of the kernel a stage has."""

Rank = int | tuple[int, ...]
Ranks = tuple[int, ...]

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
"""What the stages of a chain are called in files, in order; no chain is longer."""


class _Swappable(Protocol):
    def swapaxes(self, one: int, other: int, /) -> Any: ...


Weight = TypeVar("Weight", bound=_Swappable)
"""A tensor, or an array."""

_WORDS = ("two", "three", "four", "five", "six", "seven", "eight")


def ranks_of(rank: Rank) -> Ranks:
    """One number for each cut.

    >>> ranks_of(3), ranks_of((3, 4))
    ((3,), (3, 4))
    """
    return rank if isinstance(rank, tuple) else (rank,)


def rank_of(ranks: Sequence[int]) -> Rank:
    """As users see it: an int for a single cut, a tuple for several."""
    return ranks[0] if len(ranks) == 1 else tuple(ranks)


def flat_ranks(ranks: Mapping[str, Rank]) -> Ranks:
    """Those of all layers, cut by cut, in order."""
    return tuple(each for rank in ranks.values() for each in ranks_of(rank))


def given_ranks(rank: object) -> Sequence[Any]:
    """What was given for a layer, as a sequence."""
    return rank if isinstance(rank, tuple | list) else [rank]


def is_within(rank: object, most: Rank) -> bool:
    """Whether these are ranks of a layer that has at most so many bases: an int, or for several cuts a tuple."""
    if not isinstance(most, tuple):
        return is_integer(rank) and 1 <= rank <= most
    is_kind = isinstance(rank, tuple | list) and len(rank) == len(most)
    return is_kind and all(is_integer(r) and 1 <= r <= limit for r, limit in zip(given_ranks(rank), most, strict=True))


def allowed_ranks(most: Rank) -> str:
    """What may be given for a layer that has at most so many bases, in words."""
    if isinstance(most, tuple):
        return f"a tuple of {len(most)} ints, {' and '.join(f'1 to {limit}' for limit in most)}"
    return f"an int, 1 to {most}"


def like_ranks(ranks: Mapping[str, Rank], flat: Iterable[int]) -> dict[str, Rank]:
    """The other way round: numbers for all cuts in order, by the layers that these ranks are of.

    >>> like_ranks({"a": 1, "b": (1, 2)}, [3, 4, 5])
    {'a': 3, 'b': (4, 5)}
    """
    numbers = iter(flat)
    return {name: rank_of([next(numbers) for _ in ranks_of(rank)]) for name, rank in ranks.items()}


def in_words(rank: Rank) -> str:
    """What a layer with these ranks consists of.

    >>> in_words(3), in_words((3, 4))
    ('two factors', 'three factors')
    """
    return f"{_WORDS[len(ranks_of(rank)) - 1]} factors"


def stages_named(form: str, axes: int) -> tuple[Axes, ...] | None:
    """The stages of the forms that files tell by their name alone; None for others, of which a file has the stages.

    >>> stages_named("spatial", 2), stages_named("channel", 1)
    (((False, True), (True, False)), ((True,), (False,)))
    """
    if form == "spatial" and axes == 2:
        return (False, True), (True, False)
    return ((True,) * axes, (False,) * axes) if form == "channel" else None


def price(per_stage: Sequence[int], ranks: Sequence[int]) -> int:
    """What all stages cost together, where `per_stage` is what each costs per unit of the ranks before and behind it.

    Never falls as a rank grows. With arrays of ranks it is an array, of all of them.

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
        """Which of the stages hold their weight as (inputs, outputs, kernel)."""
        return tuple(self.transposed and any(axes) for axes in self.stages)

    @cached_property
    def kernels(self) -> tuple[tuple[int, ...], ...]:
        """The kernel of every stage."""
        kernel = self.shape[2:]
        return tuple(tuple(size if own else 1 for size, own in zip(kernel, axes, strict=True)) for axes in self.stages)

    @cached_property
    def full_ranks(self) -> Ranks:
        """The most bases that each cut can have: at most the entries of either side of it."""
        areas = [math.prod(kernel) for kernel in self.kernels]
        outputs, inputs = self.shape[:2]
        return tuple(
            min(inputs * math.prod(areas[:cut]), outputs * math.prod(areas[cut:])) for cut in range(1, len(areas))
        )

    @property
    def full_rank(self) -> Rank:
        """The same as users see it."""
        return rank_of(self.full_ranks)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Weights of every stage per unit of the ranks before and behind it."""
        shapes = self.shapes((1,) * len(self.full_ranks))
        return tuple(math.prod(shape) for shape in shapes)

    @property
    def dense_size(self) -> int:
        """Weights of the dense layer."""
        return math.prod(self.shape)

    def shapes(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The shapes of all stages' weights at these ranks."""
        ends = (self.shape[1], *ranks, self.shape[0])
        return tuple((ends[i + 1], ends[i], *kernel) for i, kernel in enumerate(self.kernels))

    def held(self, weights: Sequence[Weight]) -> tuple[Weight, ...]:
        """The weights of all stages as the layers hold them; and of such weights, the other way round."""
        return tuple(w.swapaxes(0, 1) if s else w for w, s in zip(weights, self.swapped, strict=True))

    def held_dense(self, weight: Weight) -> Weight:
        """The same of the dense weight."""
        return weight.swapaxes(0, 1) if self.transposed else weight

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of the dense weight as its layer holds it."""
        outputs, inputs, *kernel = self.shape
        return (inputs, outputs, *kernel) if self.transposed else self.shape

    def applied(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[int, ...]:
        """At how many positions the weight of every stage is applied: at those of the map behind it, and that of a
        transposed convolution at those of the map before it.

        >>> Chain((8, 4, 2, 2), ((False, False), (True, True)), transposed=True).applied((5, 6), (10, 12))
        (30, 30)
        """
        behind = self.positions(inputs, outputs)
        return (math.prod(inputs), *behind[:-1]) if self.transposed else behind

    def positions(self, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[int, ...]:
        """How many positions the map behind every stage has, from the extents of the layer's input and output: along an
        axis those of the output, once a stage has had it.

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
