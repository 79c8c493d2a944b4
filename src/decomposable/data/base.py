"""What training needs from a data set: any batch of it, by number, with random numbers that are handed in.

Nothing here has a state. Which images make up batch k of a training, and how they are augmented, follows from the seed
and k alone, so that a run which was cut off goes on exactly where it was, with any number of worker processes.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from decomposable_edge.errors import DataError, DecomposableError, InvalidArgumentError
from decomposable_edge.interrupts import leave_signals_to_the_parent

Batch = tuple[Tensor, Tensor]
Augment = Callable[[Tensor, torch.Generator], Tensor]
Prepare = Callable[[Tensor], Tensor]


UNKNOWN = -1
"""The label of an image whose class nobody knows: to be cut by, and not to be trained or judged by."""


class Data(Protocol):
    """Images in two parts; labels are 0 … classes − 1, or all of them `UNKNOWN`. Must be picklable where worker
    processes are used.
    """

    @property
    def classes(self) -> int:
        """How many there are."""

    @property
    def train_count(self) -> int:
        """Images to train with."""

    @property
    def test_count(self) -> int:
        """Images to test with."""

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """These training images, augmented, as the network takes them; all that is random is from the generator."""

    def test_batch(self, indices: Tensor) -> Batch:
        """These test images, as the network takes them."""


@runtime_checkable
class InParts(Protocol):
    """Data of which a part of a batch can be made without the rest, each image as it is in the whole batch."""

    def train_part(self, indices: Tensor, generator: torch.Generator, part: slice) -> Batch:
        """A part of what `train_batch` returns."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images (N × C × H × W, bytes or floats) and their labels (N), in memory."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class TwoParts:
    """How many images a data set has whose parts know their length."""

    train: Any
    test: Any

    @property
    def train_count(self) -> int:
        """Images to train with."""
        return len(self.train)

    @property
    def test_count(self) -> int:
        """Images to test with."""
        return len(self.test)


@dataclass(frozen=True, kw_only=True, eq=False)
class InMemory(TwoParts):
    """A data set that fits into memory."""

    classes: int
    train: Images
    test: Images
    augment: Augment
    prepare: Prepare

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """These training images, augmented."""
        return self.augment(self.train.pixels[indices], generator), self.train.labels[indices]

    def test_batch(self, indices: Tensor) -> Batch:
        """These test images, prepared."""
        return self.prepare(self.test.pixels[indices]), self.test.labels[indices]


@dataclass(frozen=True, kw_only=True, eq=False)
class FromDatasets(TwoParts):
    """Two map-style PyTorch data sets of (input, label) pairs, or of inputs alone, with whatever transforms they have.

    >>> from torch.utils.data import TensorDataset
    >>> pairs = TensorDataset(torch.zeros(6, 3), torch.arange(6) % 2)
    >>> data = FromDatasets(classes=2, train=pairs, test=pairs)
    >>> data.test_batch(torch.tensor([0, 1]))[1]
    tensor([0, 1])
    """

    classes: int
    train: Dataset[Any]
    test: Dataset[Any]

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """These training samples; what their transforms draw from global generators follows from the generator."""
        with _seeded(int(torch.randint(2**31, (), generator=generator))):
            return _collate(self.train, indices)

    def test_batch(self, indices: Tensor) -> Batch:
        """These test samples, the same every time even where a transform is random."""
        with _seeded(int(indices[0])):
            return _collate(self.test, indices)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, from which transforms draw, and put them back afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would set those of GPUs too, for good
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _collate(dataset: Dataset[Any], indices: Tensor) -> Batch:
    samples = [dataset[i] for i in indices.tolist()]
    if samples and not isinstance(samples[0], tuple | list):
        return default_collate(samples), torch.full((len(samples),), UNKNOWN)
    x, y = default_collate(samples)
    return x, torch.as_tensor(y)


def has_labels(batch: Batch) -> bool:
    """Whether anybody knows the classes of its images."""
    labels = batch[1]
    return not (labels.dim() == 1 and not labels.is_floating_point() and bool((labels == UNKNOWN).all()))


def generator_for(seed: int, purpose: str, number: int) -> torch.Generator:
    """A generator of its own for every purpose and number, such as the augmentation of batch 7."""
    digest = hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _with_checked_labels(batch: Batch, classes: int) -> Batch:
    """The batch; in training, a label that is no class would end in an error that nobody can read."""
    labels = batch[1]
    if labels.dim() == 1 and not labels.is_floating_point() and len(labels) and has_labels(batch):
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            wrong = low if low < 0 else high
            raise DataError(f"data: a label is {wrong}; allowed: 0 to {classes - 1}, as there are {classes} classes")
    return batch


class TrainBatches(Dataset[Batch]):
    """The batches of a whole training by number: every epoch has each image once, in an order of its own.

    What is left over at the end of an epoch is left out, so that all batches are of one size. Where several processes
    train together, each has its `place` among so many, and that part of every batch: no image is in two, none is lost.
    """

    def __init__(self, data: Data, *, batch_size: int, epochs: int, seed: int, place: tuple[int, int] = (0, 1)) -> None:
        if not 1 <= batch_size <= data.train_count:
            raise InvalidArgumentError(
                f"batch_size={batch_size}; allowed: an int from 1 to {data.train_count:,}, the count of training images"
            )
        index, processes = place
        if batch_size < processes:
            raise InvalidArgumentError(
                f"batch_size={batch_size}; allowed: at least {processes}, one image for each of the processes"
            )
        self.data, self.batch_size, self.epochs, self.seed = data, batch_size, epochs, seed
        self.part = slice(index * batch_size // processes, (index + 1) * batch_size // processes)
        self.per_epoch = data.train_count // batch_size
        self._order: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self.epochs * self.per_epoch

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(number)
        epoch, place = divmod(number, self.per_epoch)
        indices = self._order_of(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        generator = generator_for(self.seed, "augmentation", number)
        return _with_checked_labels(self._part_of(indices, generator), self.data.classes)

    def _part_of(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """The images of this process; where the data cannot say how these alone are augmented, all are made."""
        if self.part == slice(0, self.batch_size):
            return self.data.train_batch(indices, generator)
        if isinstance(self.data, InParts):
            return self.data.train_part(indices, generator, self.part)
        x, y = self.data.train_batch(indices, generator)
        return x[self.part], y[self.part]

    def _order_of(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = generator_for(self.seed, "order", epoch)
            self._order = epoch, torch.randperm(self.data.train_count, generator=generator)
        return self._order[1]

    def loader(self, start: int = 0, *, workers: int = 0) -> _Loader:
        """The batches from number `start` on, made ahead in `workers` processes."""
        return _Loader(self, range(start, len(self)), workers)


class TestBatches(Dataset[Batch]):
    """The test images in order; the last batch may be smaller."""

    __test__ = False  # not a test case

    def __init__(self, data: Data, *, batch_size: int) -> None:
        self.data, self.batch_size = data, batch_size

    def __len__(self) -> int:
        return -(-self.data.test_count // self.batch_size)

    def __getitem__(self, number: int) -> Batch:
        start = number * self.batch_size
        if not 0 <= start < self.data.test_count:
            raise IndexError(number)
        batch = self.data.test_batch(torch.arange(start, min(start + self.batch_size, self.data.test_count)))
        return _with_checked_labels(batch, self.data.classes)

    def loader(self, *, workers: int = 0, place: tuple[int, int] = (0, 1)) -> _Loader:
        """All batches, or every so manieth from a `place` on, made ahead in `workers` processes."""
        return _Loader(self, range(len(self))[place[0] :: place[1]], workers)


class _Loader:
    """Batches by number, made ahead by worker processes."""

    def __init__(self, batches: TrainBatches | TestBatches, numbers: Sequence[int], workers: int) -> None:
        self.batches, self.numbers = batches, numbers
        self.workers = min(workers, os.cpu_count() or 1)  # more would only wait for each other

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Batch]:
        loader: DataLoader[Any] = DataLoader(
            _Shielded(self.batches),
            batch_size=None,  # a number stands for a whole batch
            sampler=self.numbers,
            num_workers=self.workers,
            worker_init_fn=leave_signals_to_the_parent,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else starting an iterator would advance the global one
        )
        with _child_handler.aside() if self.workers else nullcontext():
            batches = iter(loader)
            try:
                yield from self._checked(batches)
            finally:
                # Now, and not when the last traceback that holds it is gone: by then the handler is back.
                getattr(batches, "_shutdown_workers", lambda: None)()

    def _checked(self, batches: Iterator[Any]) -> Iterator[Batch]:
        while True:
            try:
                batch = next(batches, None)
            except (RuntimeError, EOFError, OSError) as error:
                if not self.workers or not _is_of_a_dead_worker(error):
                    raise
                raise DataError(
                    "a worker process that makes batches was killed, perhaps for want of memory; "
                    "--resume goes on from the last checkpoint, with fewer workers if need be"
                ) from error
            if batch is None:
                return
            if isinstance(batch, DecomposableError):
                raise batch
            yield batch


class _ChildHandler:
    """The program's handler of SIGCHLD, put aside from the first loader that starts to the last one that ends.

    So the death of a worker is raised where its batch is waited for, some seconds later. Torch's own handler raises it
    wherever the program happens to be: in the middle of a checkpoint, or where no exception can be raised, and then it
    is lost, or leaves a queue that is waited for without end.
    """

    def __init__(self) -> None:
        self._users = 0
        self._is_aside = False
        self._before: Any = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """No handler meanwhile."""
        if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
            yield  # where torch sets no handler
            return
        if not self._is_aside:
            self._before = signal.getsignal(signal.SIGCHLD)
            torch.utils.data._utils.signal_handling._set_SIGCHLD_handler()  # it does so once, and not after this
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._is_aside = True
        self._users += 1
        try:
            yield
        finally:  # in any thread; only the main one may set handlers, so that otherwise the next to end there does it
            self._users -= 1
            if self._users == 0 and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, self._before)
                self._is_aside = False


_child_handler = _ChildHandler()


def _is_of_a_dead_worker(error: Exception) -> bool:
    """Torch's words, or a connection to the worker, on which it hands over memory, that nobody answers any more."""
    is_connection = isinstance(error, EOFError | ConnectionError | FileNotFoundError)
    is_raised_in_it = str(error).startswith("Caught ")  # by the data set, and only handed on
    return "DataLoader worker (pid" in str(error) or (is_connection and not is_raised_in_it)


class _Shielded(Dataset[Any]):
    """Batches, or why there is none: raised in a worker, an error of ours would arrive wrapped in its traceback."""

    def __init__(self, batches: TrainBatches | TestBatches) -> None:
        self.batches = batches

    def __getitem__(self, number: int) -> Batch | DecomposableError:
        try:
            return self.batches[number]
        except DecomposableError as error:
            return error
