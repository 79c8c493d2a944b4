"""CIFAR-10 and CIFAR-100 from their original files, in the binary layout.

A file is a sequence of records: one label byte (CIFAR-100: a coarse one, then a fine one), then 3 × 32 × 32 bytes of
pixels. It may hold fewer images than the original, so that a subset is a data set too, but never more.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from decomposable.data import folders
from decomposable.data.augment import PadCropFlip, PerChannel, Standardise
from decomposable.data.base import Images, InMemory
from decomposable_edge.errors import DataError

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR100_MEAN, CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


class _Cifar(NamedTuple):
    """What tells the two sets apart."""

    name: str
    classes: int
    label_bytes: int  # at the head of a record; the last of them is the label
    largest: int  # images in the largest file
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    pickled: str  # a file of the python version, which is not read

    @property
    def description(self) -> str:
        return f"the binary version of {self.name} ({self.train[0]} … of {self.folder})"


_CIFAR10 = _Cifar(
    name="CIFAR-10",
    classes=10,
    label_bytes=1,
    largest=10_000,
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test=("test_batch.bin",),
    pickled="cifar-10-batches-py/data_batch_1",
)
_CIFAR100 = _Cifar(
    name="CIFAR-100",
    classes=100,
    label_bytes=2,
    largest=50_000,
    folder="cifar-100-binary",
    train=("train.bin",),
    test=("test.bin",),
    pickled="cifar-100-python/train",
)


def load_cifar10(
    folder: Path | str | None, *, mean: PerChannel = CIFAR10_MEAN, std: PerChannel = CIFAR10_STD
) -> InMemory:
    """Load CIFAR-10 from a folder with its binary files, or with the folder `cifar-10-batches-bin`."""
    return _load(_CIFAR10, folder, Standardise.of(mean, std, channels=3))


def load_cifar100(
    folder: Path | str | None, *, mean: PerChannel = CIFAR100_MEAN, std: PerChannel = CIFAR100_STD
) -> InMemory:
    """Load CIFAR-100 (fine labels) from a folder with its binary files, or with the folder `cifar-100-binary`."""
    return _load(_CIFAR100, folder, Standardise.of(mean, std, channels=3))


def _load(cifar: _Cifar, folder: Path | str | None, standardise: Standardise) -> InMemory:
    place = _find(cifar, folders.given(folder, cifar.description, SOURCE))
    folders.all_there(place, cifar.train + cifar.test, SOURCE)
    train, test = (_join([_read(cifar, place / name) for name in part]) for part in (cifar.train, cifar.test))
    return InMemory(
        classes=cifar.classes, train=train, test=test, augment=PadCropFlip(standardise), prepare=standardise
    )


def _find(cifar: _Cifar, folder: Path) -> Path:
    """Return where the files are."""
    for place in (folder, folder / cifar.folder):
        if any((place / name).is_file() for name in cifar.train + cifar.test):
            return place
    pickled = Path(cifar.pickled)
    if (folder / pickled).is_file() or (folder / pickled.name).is_file():
        raise DataError(
            f"--data {folder}: holds the python version of {cifar.name}, whose files are pickles and could run code; "
            f"allowed: {cifar.description}, to be had from {SOURCE}"
        )
    raise folders.none_there(folder, cifar.name, cifar.description, SOURCE)


def _read(cifar: _Cifar, file: Path) -> tuple[np.ndarray, np.ndarray]:
    record = cifar.label_bytes + PIXELS
    content = folders.read_bytes(file, cifar.largest * record)
    if not content or len(content) % record:
        raise DataError(
            f"{file}: {len(content):,} bytes; allowed: records of {record:,} bytes, from 1 to {cifar.largest:,} of them"
        )
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    labels = rows[:, cifar.label_bytes - 1].astype(np.int64)
    folders.check_labels(file, labels, cifar.classes)
    return rows[:, cifar.label_bytes :], labels


def _join(parts: list[tuple[np.ndarray, np.ndarray]]) -> Images:
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Images(torch.from_numpy(pixels).view(-1, *SHAPE), torch.from_numpy(labels))
