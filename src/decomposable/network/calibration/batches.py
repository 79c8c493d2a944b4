"""The batches that a calibration or a tuning sees: checked as they come, and the first kept to be seen again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from decomposable.core.tracing import Forward, call_with_first, first_entry
from decomposable_edge.errors import InvalidArgumentError

MOST_KEPT = 1 << 29
"""Bytes of batches that are kept, beyond the first one: 512 MiB."""

_FEWEST = 32  # samples that statistics are still worth something of
_BEGINS_ANEW = "one that begins anew, such as a DataLoader or a list"


class Kept:
    """The batches of a loader, which is gone through once; as many of the first ones as memory allows are kept.

    `inputs_of(batch)` is what the network sees of a batch, which must hold no NaN. Where it is `first_entry`, the
    network sees no more than that, so that a part of a batch can be taken.
    """

    def __init__(self, loader: Iterable[Any], inputs_of: Callable[[Any], Any], option: str = "loader") -> None:
        self._loader, self._inputs_of, self._option = loader, inputs_of, option
        self.count = 0  # so far
        self._first: list[Any] = []
        self._bytes = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self.count += 1
            _refuse_nan(self._option, self.count, self._inputs_of(batch))
            self._bytes += sum(t.numel() * t.element_size() for t in tensors_in(batch))
            if self._bytes <= MOST_KEPT or not self._first:
                self._first.append(batch)
            yield batch
        if not self.count:
            raise InvalidArgumentError.about(self._option, 0, "at least one batch", why="it yielded none")

    @property
    def expected(self) -> int:
        """Return how many batches there will be in all, as far as that is known; else 0."""
        try:
            return max(self.count, len(self._loader))  # type: ignore[arg-type]
        except TypeError:  # a generator, or a `DataLoader` of an `IterableDataset`
            return self.count

    def part(self, share: float) -> tuple[list[Any], float]:
        """Return the first batches, at least such a share of all or as many as are kept; and how many they are.

        Of a large batch a part is taken, where that can be done.
        """
        wanted = share * self.count
        if wanted < 1:
            head, part = self.head(max(_FEWEST, math.ceil(wanted * self._samples)))
            return [head], part
        found = self._first[: math.ceil(wanted)]
        return found, float(len(found))

    def head(self, samples: int) -> tuple[Any, float]:
        """Return so many samples of the first batch, and which part of it they are; all where they are not to part."""
        if self._inputs_of is not first_entry or not 0 < samples < self._samples:
            return self._first[0], 1.0
        return first_entry(self._first[0])[:samples], samples / self._samples

    @property
    def _samples(self) -> int:
        """Return how many samples the first batch has; 0 if that is not known."""
        inputs = self._inputs_of(self._first[0])
        return len(inputs) if isinstance(inputs, Tensor) and inputs.dim() > 1 else 0

    @property
    def _renewed(self) -> Iterable[Any] | None:
        """Return all batches, for many passes; None if the loader is over and not all are kept."""
        if len(self._first) == self.count:
            return self._first
        return None if iter(self._loader) is self._loader else self._loader

    def again_from_start(self) -> Kept:
        """Return all of them once more; of a loader that is over, those that are kept."""
        renewed = self._renewed
        return Kept(self._first if renewed is None else renewed, self._inputs_of, self._option)

    def again(self) -> Iterable[Any]:
        """Return all of them, to be gone through many times."""
        for _ in self:
            pass
        renewed = self._renewed
        if renewed is None:
            came, allowed = type(self._loader).__name__, f"fewer images, or {_BEGINS_ANEW}"
            why = f"it can be gone through only once, and its batches take more than {MOST_KEPT >> 20} MiB to keep"
            raise InvalidArgumentError.about(self._option, came, allowed, why=why)
        return renewed


def renewable(loader: Iterable[Any], forward: Forward, option: str) -> Iterable[Any]:
    """Return a loader that begins anew each time as it is; of one that is over after once, the batches."""
    if not isinstance(loader, Iterable):
        raise InvalidArgumentError.about(option, loader, "what yields batches")
    return Kept(loader, seen_by(forward), option).again() if isinstance(loader, Iterator) else loader


def seen_by(forward: Forward) -> Callable[[Any], Any]:
    """Return what tells what a network sees of a batch: all of it where the network is run in a way of its own."""
    return first_entry if forward is call_with_first else lambda batch: batch


def endless(loader: Iterable[Any], inputs_of: Callable[[Any], Any], option: str) -> Iterator[Any]:
    """Yield the batches of a loader again and again, its first batch only the first time, to be judged by.

    Where there is no other batch, the first one comes each time.
    """
    count = in_a_pass = 0
    while True:
        before = count
        for place, batch in enumerate(loader):
            count += 1
            _refuse_nan(option, count, inputs_of(batch))
            if place or in_a_pass < 2:
                yield batch
        in_a_pass = count - before
        if count == before:
            why = f"it yielded no more than {count} batches" if count else "it yielded no batch"
            raise InvalidArgumentError.about(option, count, _BEGINS_ANEW, why=why)


def _refuse_nan(option: str, number: int, inputs: Any) -> None:
    for tensor in tensors_in(inputs):
        if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
            why = f"batch {number} has NaN in it"
            raise InvalidArgumentError.about(option, number, "numbers only", why=why)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a batch, or in what a network returns.

    >>> [t.item() for t in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), "x"]})]
    [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)
