"""The data of a cut in two parts: batches that a metric is measured with, and others that judge it.

What a metric was fitted to cannot show that it is wrong. So every fifth batch is kept out. Of few samples a fifth would
say too little: then there are two halves, of which each judges what the other has measured.
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
"""Samples of which a fifth, 64, would be too few to judge by."""

EVERY, KEPT_OUT = 5, 1
"""One batch of so many is kept out; of a loader that is not kept in memory the second, so that there is always one."""

JUDGED_WITH = 512
"""Samples at most that judge, in whole batches; what is more measures."""

_FEWEST_BATCHES, _FEWEST_OF_FEW = 10, 4  # so many can be dealt out, and tell by how much they differ

_CLOSE = 1e-3  # of the largest output

Run = Callable[[Any], Any]

CHANGES = (
    "data: the loader gives other batches in every pass, so that some of the images that judge the cut have been seen "
    "by it; a loader in a fixed order (shuffle=False), or of at most 512 MiB, keeps them apart"
)


@dataclass(frozen=True, eq=False)
class Samples:
    """What measures and what judges. Where `are_halves`, each of the two does both: there is too little to keep out."""

    measure: Iterable[Any]
    judge: Sequence[Any]
    measuring: int  # samples
    judging: int  # samples
    batches: int  # that measure
    are_halves: bool = False

    @property
    def count(self) -> int:
        """Samples in all."""
        return self.measuring + self.judging

    @property
    def all_that_measure(self) -> Samples:
        """The same with all batches that bases and statistics come from in the place of those that measure."""
        if not self.are_halves:
            return self
        batches = [*self.measure, *self.judge]
        return replace(self, measure=batches, measuring=self.count, judge=(), judging=0, batches=len(batches))

    @property
    def judges(self) -> tuple[Iterable[Any], ...]:
        """The batches that judge what the first part has measured, and of halves the second."""
        return (self.judge, self.measure) if self.are_halves else (self.judge,)

    def first(self, most: int) -> Samples:
        """The same with so many samples to measure with, or a few more, in whole batches."""
        if self.measuring <= most:
            return self
        batches = max(1, -(-most * self.batches // self.measuring))
        measuring = round(batches * self.measuring / self.batches)
        return replace(self, measure=_First(self.measure, batches), measuring=measuring, batches=batches)


def dealt(loader: Iterable[Any], run: Run) -> Samples:
    """The batches of a loader, dealt out; where they take at most `MOST_KEPT` bytes they are kept, and read once.

    `run(batch)` gives the outputs of the network, which tell whether a part of a batch is one of its samples.
    """
    kept, apart, counts = _read(loader)
    if not counts:
        raise InvalidArgumentError("data: it yielded no batch; allowed: a loader that can be gone through again")
    if kept is None:
        judging = sum(map(samples_in, apart))
        return Samples(_Others(loader, apart), apart, sum(counts) - judging, judging, len(counts) - len(apart))
    few = sum(counts) < FEW
    pieces = _pieces(kept, _FEWEST_OF_FEW if few else _FEWEST_BATCHES, run)
    every = 2 if few else EVERY
    places = range(every - 1, len(pieces), every)
    judge = [pieces[place] for place in (places if few else _enough(pieces, places))]
    chosen = places[: len(judge)]
    measure = [batch for place, batch in enumerate(pieces) if place not in chosen]
    measuring, judging = (sum(map(samples_in, part)) for part in (measure, judge))
    return Samples(measure, judge, measuring, judging, len(measure), are_halves=few)


def _enough(batches: Sequence[Any], places: Sequence[int]) -> Sequence[int]:
    """The first of the places whose batches have as many samples as judge, or a few more."""
    held = list(accumulate(samples_in(batches[place]) for place in places))
    return places[: 1 + sum(count < JUDGED_WITH for count in held)]


def _read(loader: Iterable[Any]) -> tuple[list[Any] | None, list[Any], list[int]]:
    """All batches, where memory allows; some that are kept apart in any case; and how many samples each has."""
    is_there = isinstance(loader, list | tuple)  # in memory as it is
    kept: list[Any] | None = []
    apart: list[Any] = []
    counts: list[int] = []
    size = held = 0
    for place, batch in enumerate(loader):
        counts.append(samples_in(batch))
        size += 0 if is_there else sum(t.numel() * t.element_size() for t in tensors_in(batch))
        if kept is not None and size <= MOST_KEPT:
            kept.append(batch)
        else:
            kept = None
        if place % EVERY == KEPT_OUT and held < JUDGED_WITH:
            apart.append(batch)
            held += counts[-1]
    return kept, apart, counts


class _First:
    """The first batches of some that can be gone through again."""

    def __init__(self, batches: Iterable[Any], count: int) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches, self._count)


class _Others:
    """The batches of a loader without those that are kept apart, every fifth."""

    def __init__(self, loader: Iterable[Any], apart: Sequence[Any]) -> None:
        self._loader, self._apart, self._has_warned = loader, apart, False

    def __iter__(self) -> Iterator[Any]:
        for place, batch in enumerate(self._loader):
            number = place // EVERY
            if place % EVERY != KEPT_OUT or number >= len(self._apart):
                yield batch
            elif not self._has_warned and not _are_equal(batch, self._apart[number]):
                self._has_warned = True
                warnings.warn(CHANGES, stacklevel=2)


def _are_equal(one: Any, other: Any) -> bool:
    first, second = first_entry(one), first_entry(other)
    return not isinstance(first, Tensor) or (isinstance(second, Tensor) and torch.equal(first, second))


def _pieces(batches: Sequence[Any], wanted: int, run: Run) -> list[Any]:
    """The batches, each in parts where there are fewer than wanted; those that cannot be parted stay whole."""
    parts = -(-wanted // len(batches))
    return list(batches) if parts == 1 else [piece for batch in batches for piece in _parted(batch, parts, run)]


def _parted(batch: Any, parts: int, run: Run) -> list[Any]:
    """A batch in so many parts of two samples or more; itself where it holds what has no rows, or rows that are no
    samples.

    >>> [len(piece[0]) for piece in _parted((torch.zeros(5, 3), torch.zeros(5)), 2, lambda batch: batch)]
    [2, 3]
    """
    count = samples_in(batch)
    parts = min(parts, count // 2)
    has_rows = all(isinstance(each, Tensor) and each.dim() and len(each) == count for each in _leaves(batch))
    if parts < 2 or not has_rows:
        return [batch]
    ends = [i * count // parts for i in range(parts + 1)]
    pieces = [map_entries(partial(_rows, start, end), batch) for start, end in pairwise(ends)]
    return pieces if _runs_alone(pieces[-1], batch, run) else [batch]


def _runs_alone(part: Any, batch: Any, run: Run) -> bool:
    """Whether the last part of a batch gives what the whole batch gives for it."""
    whole = list(tensors_in(run(batch)))
    try:
        found = list(tensors_in(run(part)))
    except Exception:  # a model that takes batches of one size only
        return False
    return 0 < len(found) == len(whole) and all(map(_is_last_of, found, whole))


def _is_last_of(part: Tensor, whole: Tensor) -> bool:
    """Whether an output has the last rows of another, along the one axis in which they differ, but for the order of
    sums. Cut along an axis of time it has not: what comes later depends on what came before.

    >>> _is_last_of(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]))
    True
    """
    if part.dim() != whole.dim():
        return False
    axes = [i for i, (one, other) in enumerate(zip(part.shape, whole.shape, strict=True)) if one != other]
    if len(axes) != 1 or part.shape[axes[0]] > whole.shape[axes[0]]:
        return False
    last = whole.narrow(axes[0], whole.shape[axes[0]] - part.shape[axes[0]], part.shape[axes[0]])
    one, other = part.double().nan_to_num(), last.double().nan_to_num()  # NaN is found out later
    return not one.numel() or bool((one - other).abs().max() <= _CLOSE * other.abs().max())


def _rows(start: int, end: int, value: Any, _: Any) -> Any:
    return value[start:end]


def _leaves(batch: Any) -> list[Any]:
    found: list[Any] = []
    map_entries(lambda value, _: found.append(value), batch)
    return found
