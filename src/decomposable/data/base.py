"""What training needs from a data set: any batch of it, by number, with random numbers that are handed in.

Nothing here has a state. Which images make up batch k of a training, and how they are augmented, follows from the seed
and k alone. So a run that was stopped continues exactly where it was, with any number of worker processes.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
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


@dataclass(frozen=True, eq=False)
class Images:
    """Hold images (N × C × H × W, bytes or floats) and their labels (N) in memory."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


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
        return _collate(self.train, indices, int(torch.randint(2**31, (), generator=generator)))

    def test_batch(self, indices: Tensor) -> Batch:
        """Return these test samples, the same every time even where a transform is random."""
        return _collate(self.test, indices, int(indices[0]))


def _collate(dataset: Dataset[Any], indices: Tensor, seed: int) -> Batch:
    with _seeded(seed):
        samples = [dataset[i] for i in indices.tolist()]
    if not isinstance(samples[0], tuple | list):
        return default_collate(samples), torch.full((len(samples),), UNKNOWN)
    x, y = default_collate(samples)
    return x, torch.as_tensor(y)


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


def generator_for(seed: int, purpose: str, number: int) -> torch.Generator:
    """Return a generator of its own for every purpose and number, such as the augmentation of batch 7."""
    digest = hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _are_classes(labels: Tensor) -> bool:
    return labels.dim() == 1 and not labels.is_floating_point()


def has_labels(batch: Batch) -> bool:
    """Return whether the classes of its images are known."""
    return not (_are_classes(batch[1]) and bool((batch[1] == UNKNOWN).all()))


class _Batches:
    """Make `count` batches of a part of a data set, each by its number."""

    def __init__(self, data: Data, batch_size: int, count: int) -> None:
        self.data, self.batch_size, self._count = data, batch_size, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(number)
        batch, classes = self._batch(number), self.data.classes
        if _are_classes(batch[1]) and has_labels(batch):
            # A label that is no class would end in an error of the training that nobody can read.
            wrong = batch[1][(batch[1] < 0) | (batch[1] >= classes)]
            if len(wrong):
                label, allowed = int(wrong[0]), f"0 to {classes - 1}, of {classes} classes"
                raise DataError.about("data", label, allowed, why=f"a label is {label}")
        return batch

    def _batch(self, number: int) -> Batch:
        raise NotImplementedError

    def loader(self, start: int = 0, step: int = 1, *, workers: int = 0) -> Iterator[Batch]:
        """Yield every `step`-th batch from number `start` on, made ahead in `workers` processes."""
        workers = min(workers, os.cpu_count() or 1)  # more would only wait for each other
        if workers:
            # Torch's handler of SIGCHLD raises the death of a worker wherever the program is at that time, even in the
            # middle of a checkpoint. Without it, the death is raised where the batch is waited for.
            torch.utils.data._utils.signal_handling._SIGCHLD_handler_set = True
        numbers: Any = range(start, len(self), step)
        loader: DataLoader[Any] = DataLoader(
            numbers,
            batch_size=None,  # a number stands for a whole batch
            collate_fn=self._batch_or_error,
            num_workers=workers,
            worker_init_fn=leave_signals_to_the_parent,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else starting an iterator would advance the global one
        )
        batches = iter(loader)
        while True:
            try:
                batch = next(batches, None)
            except (RuntimeError, EOFError, OSError) as error:
                if not workers or not _is_of_a_dead_worker(error):
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

    def _batch_or_error(self, number: Any) -> Batch | DecomposableError:
        """Return our errors: raised in a worker, they would arrive wrapped in a traceback."""
        try:
            return self[number]
        except DecomposableError as error:
            return error


class TrainBatches(_Batches):
    """Make the batches of a whole training by number: every epoch has each image once, in an order of its own.

    What is left over at the end of an epoch is left out, so that all batches have one size. Where several processes
    train together, `place` is (index, processes), and each has its part of every batch: no image is in two, none is
    lost. There are `most` batches at the most.
    """

    def __init__(
        self,
        data: Data,
        *,
        batch_size: int,
        epochs: int,
        seed: int,
        place: tuple[int, int] = (0, 1),
        most: int | None = None,
    ) -> None:
        index, processes = place
        if not processes <= batch_size <= data.train_count:
            at_least = f"{processes}, one image for each process," if processes > 1 else "1"
            allowed = f"an int from {at_least} to {data.train_count:,}"
            raise InvalidArgumentError.about("batch_size", batch_size, allowed)
        self.epochs, self.seed, self.per_epoch = epochs, seed, data.train_count // batch_size
        count = epochs * self.per_epoch
        super().__init__(data, batch_size, count if most is None else min(most, count))
        self.part = slice(index * batch_size // processes, (index + 1) * batch_size // processes)
        self._order: tuple[int, Tensor] | None = None

    def _batch(self, number: int) -> Batch:
        """Return the images of this process; where the data cannot make these alone, it makes all."""
        epoch, place = divmod(number, self.per_epoch)
        if self._order is None or self._order[0] != epoch:
            generator = generator_for(self.seed, "order", epoch)
            self._order = epoch, torch.randperm(self.data.train_count, generator=generator)
        indices = self._order[1][place * self.batch_size : (place + 1) * self.batch_size]
        generator = generator_for(self.seed, "augmentation", number)
        if self.part != slice(0, self.batch_size) and hasattr(self.data, "train_part"):
            batch: Batch = self.data.train_part(indices, generator, self.part)
            return batch
        x, y = self.data.train_batch(indices, generator)
        return x[self.part], y[self.part]


class TestBatches(_Batches):
    """Make batches of the test images in order; the last one may be smaller."""

    __test__ = False  # not a test case

    def __init__(self, data: Data, *, batch_size: int) -> None:
        super().__init__(data, batch_size, -(-data.test_count // batch_size))

    def _batch(self, number: int) -> Batch:
        first = number * self.batch_size
        return self.data.test_batch(torch.arange(first, min(first + self.batch_size, self.data.test_count)))


def _is_of_a_dead_worker(error: Exception) -> bool:
    """Return whether torch says so, or a connection to the worker, which hands over memory, is not answered."""
    is_connection = isinstance(error, EOFError | ConnectionError | FileNotFoundError)
    is_raised_in_it = str(error).startswith("Caught ")  # by the data set
    return "DataLoader worker (pid" in str(error) or (is_connection and not is_raised_in_it)
