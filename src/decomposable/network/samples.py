"""The data of a cut in two parts: batches that a metric is measured with, and batches that judge it.

Data that a metric was fitted to cannot show that it is wrong. So every fifth batch is kept out. With few samples a
fifth would say too little; then there are two halves, and each judges what the other has measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from decomposable.core.moments import samples_in
from decomposable.core.tracing import first_entry, map_entries
from decomposable.network.calibration.batches import MOST_KEPT, tensors_in
from decomposable_edge.errors import InvalidArgumentError

FEW = 320
"""Below so many samples there are two halves: a fifth, 64, would be too few to judge by."""

EVERY, KEPT_OUT = 5, 1
"""One batch of five is kept out. Of a loader that is not kept in memory it is the second: so there always is one."""

JUDGED_WITH = 512
"""The most samples that judge, in whole batches. All others measure."""

_FEWEST_BATCHES, _FEWEST_OF_FEW = 10, 4  # the batches must be enough to be shared out, and to show how they differ
_CLOSE = 1e-3  # relative to the largest output

CHANGES = (
    "data: the loader gives other batches in every pass, so that some of the images that judge the cut have been seen "
    "by it; a loader in a fixed order (shuffle=False), or of at most 512 MiB, keeps them apart"
)


class _Again:
    """Batches that can be gone through again and again."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


@dataclass(frozen=True, eq=False)
class Samples:
    """The batches that measure, those that judge, and how many samples each part has.

    Where they `are_halves`, each part does both.
    """

    measure: Iterable[Any]
    judge: Sequence[Any]
    measuring: int  # samples
    judging: int  # samples
    batches: int  # that measure
    are_halves: bool = False

    @property
    def count(self) -> int:
        """Return how many samples there are."""
        return self.measuring + self.judging

    @property
    def all_that_measure(self) -> Samples:
        """Return the same with every batch that measures, both halves where there are two."""
        if not self.are_halves:
            return self
        batches = [*self.measure, *self.judge]
        return replace(self, measure=batches, measuring=self.count, judge=(), judging=0, batches=len(batches))

    @property
    def judges(self) -> tuple[Iterable[Any], ...]:
        """Return the batches that judge the first part and, of halves, those that judge the second."""
        return (self.judge, self.measure) if self.are_halves else (self.judge,)

    def first(self, most: int) -> Samples:
        """Return the same with about so many samples to measure with, in whole batches."""
        if self.measuring <= most:
            return self
        batches = max(1, -(-most * self.batches // self.measuring))
        measuring = round(batches * self.measuring / self.batches)
        measure = _Again(lambda: islice(self.measure, batches))
        return replace(self, measure=measure, measuring=measuring, batches=batches)


def dealt(loader: Iterable[Any], run: Callable[[Any], Any]) -> Samples:
    """Share out the batches of a loader. If they take at most `MOST_KEPT` bytes, they are kept and read only once.

    `run(batch)` gives the network's outputs. They show whether a batch can be split into its samples.
    """
    kept, apart, counts = _read(loader)
    if not counts:
        raise InvalidArgumentError.about("data", 0, "a loader that begins anew each time", why="it yielded no batch")
    if kept is None:
        judging = sum(map(samples_in, apart))
        others = _Again(lambda: _others(loader, apart))
        return Samples(others, apart, sum(counts) - judging, judging, len(counts) - len(apart))
    few = sum(counts) < FEW
    parts = -(-(_FEWEST_OF_FEW if few else _FEWEST_BATCHES) // len(kept))
    pieces = kept if parts == 1 else [piece for batch in kept for piece in _split(batch, parts, run)]
    every = 2 if few else EVERY
    places = range(every - 1, len(pieces), every)
    if not few:  # as many as judge, or a few more
        held = accumulate(samples_in(pieces[place]) for place in places)
        places = places[: 1 + sum(count < JUDGED_WITH for count in held)]
    measure = [batch for place, batch in enumerate(pieces) if place not in places]
    judge = [pieces[place] for place in places]
    measuring, judging = (sum(map(samples_in, part)) for part in (measure, judge))
    return Samples(measure, judge, measuring, judging, len(measure), are_halves=few)


def _read(loader: Iterable[Any]) -> tuple[list[Any] | None, list[Any], list[int]]:
    """Return all batches if memory allows, those to keep out if not, and how many samples each batch has."""
    is_in_memory = isinstance(loader, list | tuple)
    kept: list[Any] | None = []
    apart: list[Any] = []
    counts: list[int] = []
    size = held = 0
    for place, batch in enumerate(loader):
        counts.append(samples_in(batch))
        size += 0 if is_in_memory else sum(t.nbytes for t in tensors_in(batch))
        if kept is not None:
            kept.append(batch)
        if size > MOST_KEPT:
            kept = None
        if place % EVERY == KEPT_OUT and held < JUDGED_WITH:
            apart.append(batch)
            held += counts[-1]
    return kept, apart, counts


def _others(loader: Iterable[Any], apart: Sequence[Any]) -> Iterator[Any]:
    """Yield the batches of a loader that are not kept out."""
    for place, batch in enumerate(loader):
        number = place // EVERY
        if place % EVERY != KEPT_OUT or number >= len(apart):
            yield batch
        elif not _are_equal(batch, apart[number]):
            warnings.warn(CHANGES, stacklevel=2)


def _are_equal(one: Any, other: Any) -> bool:
    first, second = first_entry(one), first_entry(other)
    return not isinstance(first, Tensor) or (isinstance(second, Tensor) and torch.equal(first, second))


def _split(batch: Any, parts: int, run: Callable[[Any], Any]) -> list[Any]:
    """Split a batch into parts of two samples or more; return it whole if its entries are not rows of samples.

    >>> [len(piece[0]) for piece in _split((torch.zeros(5, 3), torch.zeros(5)), 2, lambda batch: batch)]
    [2, 3]
    """
    count, leaves = samples_in(batch), []
    map_entries(lambda value, _: leaves.append(value), batch)
    parts = min(parts, count // 2)
    has_rows = all(isinstance(each, Tensor) and each.dim() and len(each) == count for each in leaves)
    if parts < 2 or not has_rows:
        return [batch]
    ends = [i * count // parts for i in range(parts + 1)]
    pieces = [map_entries(partial(_rows, slice(*rows)), batch) for rows in pairwise(ends)]
    return pieces if _runs_alone(pieces[-1], batch, run) else [batch]


def _rows(part: slice, value: Any, _: Any) -> Any:
    return value[part]


def _runs_alone(part: Any, batch: Any, run: Callable[[Any], Any]) -> bool:
    """Return whether the last part of a batch gives what the whole batch gives for it."""
    whole = list(tensors_in(run(batch)))
    try:
        found = list(tensors_in(run(part)))
    except Exception:  # a model that takes batches of one size only
        return False
    return 0 < len(found) == len(whole) and all(map(_is_last_of, found, whole))


def _is_last_of(part: Tensor, whole: Tensor) -> bool:
    """Return whether an output has the last rows of another, along the one axis in which they differ.

    Steps of time do not pass: what comes later depends on what came before.

    >>> _is_last_of(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]))
    True
    """
    if part.dim() != whole.dim():
        return False
    axes = [i for i, (one, other) in enumerate(zip(part.shape, whole.shape, strict=True)) if one != other]
    if len(axes) != 1 or part.shape[axes[0]] > whole.shape[axes[0]]:
        return False
    last = whole.narrow(axes[0], whole.shape[axes[0]] - part.shape[axes[0]], part.shape[axes[0]])
    one, other = part.double().nan_to_num(), last.double().nan_to_num()  # NaN is refused later
    return not one.numel() or bool((one - other).abs().max() <= _CLOSE * other.abs().max())
