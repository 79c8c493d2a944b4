"""What training needs from a data set: any batch of it, by number, with random numbers that are handed in.

Nothing here has a state. Which images make up batch k of a training, and how they are augmented, follows from the seed
and k alone. So a run that was stopped continues exactly where it was, with any number of worker processes.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from decomposable_edge.errors import DataError, DecomposableError, InvalidArgumentError
from decomposable_edge.interrupts import leave_signals_to_the_parent

Batch = tuple[Tensor, Tensor]
UNKNOWN = -1
"""The label of an image whose class is not known: it can help to choose ranks, but not to train or to measure."""


class Data(Protocol):
    """Offer images in two parts; labels are 0 … classes − 1, or all of them `UNKNOWN`.

    It must be picklable where worker processes are used. It may also have ``train_part(indices, generator, part)``,
    which makes a part of a batch without the rest, each image as it is in the whole batch.
    """

    @property
    def classes(self) -> int:
        """Return the number of classes."""

    @property
    def train_count(self) -> int:
        """Return the number of training images."""

    @property
    def test_count(self) -> int:
        """Return the number of test images."""

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """Return these training images, augmented by numbers from the generator, as the network takes them."""

    def test_batch(self, indices: Tensor) -> Batch:
        """Return these test images, as the network takes them."""


@dataclass(frozen=True, eq=False)
class Images:
    """Hold images (N × C × H × W, bytes or floats) and their labels (N) in memory."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class TwoParts:
    """Count the images of a data set whose parts know their length."""

    train: Any
    test: Any

    @property
    def train_count(self) -> int:
        """Return the number of training images."""
        return len(self.train)

    @property
    def test_count(self) -> int:
        """Return the number of test images."""
        return len(self.test)


@dataclass(frozen=True, kw_only=True, eq=False)
class InMemory(TwoParts):
    """Hold a data set that fits into memory; without `augment` or `prepare` images stay as they are."""

    classes: int
    train: Images
    test: Images
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    prepare: Callable[[Tensor], Tensor] | None = None

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """Return these training images, augmented."""
        x = self.train.pixels[indices]
        return x if self.augment is None else self.augment(x, generator), self.train.labels[indices]

    def test_batch(self, indices: Tensor) -> Batch:
        """Return these test images, prepared."""
        x = self.test.pixels[indices]
        return x if self.prepare is None else self.prepare(x), self.test.labels[indices]


@dataclass(frozen=True, kw_only=True, eq=False)
class FromDatasets(TwoParts):
    """Take two map-style PyTorch data sets of (input, label) pairs, or of inputs alone, with their own transforms.

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
        """Return these training samples; the global generators that transforms draw from are seeded by this one."""
        with _seeded(int(torch.randint(2**31, (), generator=generator))):
            return _collate(self.train, indices)

    def test_batch(self, indices: Tensor) -> Batch:
        """Return these test samples, the same every time even where a transform is random."""
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


def _are_classes(labels: Tensor) -> bool:
    return labels.dim() == 1 and not labels.is_floating_point()


def has_labels(batch: Batch) -> bool:
    """Return whether the classes of its images are known."""
    return not (_are_classes(batch[1]) and bool((batch[1] == UNKNOWN).all()))


def generator_for(seed: int, purpose: str, number: int) -> torch.Generator:
    """Return a generator of its own for every purpose and number, such as the augmentation of batch 7."""
    digest = hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _with_checked_labels(batch: Batch, classes: int) -> Batch:
    """Refuse a label that is no class: in training it would end in an error that nobody can read."""
    labels = batch[1]
    if _are_classes(labels) and has_labels(batch):
        wrong = labels[(labels < 0) | (labels >= classes)]
        if len(wrong):
            raise DataError(f"data: a label is {int(wrong[0])}; allowed: 0 to {classes - 1}, of {classes} classes")
    return batch


class TrainBatches(Dataset[Batch]):
    """Make the batches of a whole training by number: every epoch has each image once, in an order of its own.

    What is left over at the end of an epoch is left out, so that all batches have one size. Where several processes
    train together, `place` is (index, processes), and each has its part of every batch: no image is in two, none is
    lost.
    """

    def __init__(self, data: Data, *, batch_size: int, epochs: int, seed: int, place: tuple[int, int] = (0, 1)) -> None:
        index, processes = place
        if not processes <= batch_size <= data.train_count:
            allowed = f"an int from {processes}, one image for each process, to {data.train_count:,}, all of them"
            raise InvalidArgumentError.about("batch_size", batch_size, allowed)
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
        """Return the images of this process; where the data cannot make these alone, it makes all."""
        train_part = getattr(self.data, "train_part", None)
        if train_part is not None and self.part != slice(0, self.batch_size):
            batch: Batch = train_part(indices, generator, self.part)
            return batch
        x, y = self.data.train_batch(indices, generator)
        return x[self.part], y[self.part]

    def _order_of(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = generator_for(self.seed, "order", epoch)
            self._order = epoch, torch.randperm(self.data.train_count, generator=generator)
        return self._order[1]

    def loader(self, start: int = 0, stop: int | None = None, *, workers: int = 0) -> _Loader:
        """Return the batches from number `start` on, made ahead in `workers` processes."""
        return _Loader(self, range(start, len(self) if stop is None else stop), workers)


class TestBatches(Dataset[Batch]):
    """Make batches of the test images in order; the last one may be smaller."""

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
        """Return all batches, or those of the process at this `place`, made ahead in `workers` processes."""
        return _Loader(self, range(len(self))[place[0] :: place[1]], workers)


class _Loader:
    """Yield batches by number, made ahead by worker processes."""

    def __init__(self, batches: TrainBatches | TestBatches, numbers: Sequence[int], workers: int) -> None:
        self.batches, self.numbers = batches, numbers
        self.workers = min(workers, os.cpu_count() or 1)  # more would only wait for each other

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Batch]:
        if self.workers:
            # Torch's handler of SIGCHLD raises the death of a worker wherever the program is at that time, even in the
            # middle of a checkpoint. Without it, the death is raised where the batch is waited for.
            torch.utils.data._utils.signal_handling._SIGCHLD_handler_set = True
        loader: DataLoader[Any] = DataLoader(
            _Shielded(self.batches),
            batch_size=None,  # a number stands for a whole batch
            sampler=self.numbers,
            num_workers=self.workers,
            worker_init_fn=leave_signals_to_the_parent,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else starting an iterator would advance the global one
        )
        batches = iter(loader)
        while True:
            try:
                batch = next(batches, None)
            except (RuntimeError, EOFError, OSError) as error:
                if not self.workers or not _is_of_a_dead_worker(error):
                    raise
                raise DataError(
                    "a worker process that makes batches was killed, perhaps because memory ran out; "
                    "--resume continues from the last checkpoint, if need be with fewer workers"
                ) from error
            if batch is None:
                return
            if isinstance(batch, DecomposableError):
                raise batch
            yield batch


def _is_of_a_dead_worker(error: Exception) -> bool:
    """Return whether torch says so, or a connection to the worker, which hands over memory, is not answered."""
    is_connection = isinstance(error, EOFError | ConnectionError | FileNotFoundError)
    is_raised_in_it = str(error).startswith("Caught ")  # by the data set
    return "DataLoader worker (pid" in str(error) or (is_connection and not is_raised_in_it)


class _Shielded(Dataset[Any]):
    """Return batches, or our error: raised in a worker, it would arrive wrapped in its traceback."""

    def __init__(self, batches: TrainBatches | TestBatches) -> None:
        self.batches = batches

    def __getitem__(self, number: int) -> Batch | DecomposableError:
        try:
            return self.batches[number]
        except DecomposableError as error:
            return error
