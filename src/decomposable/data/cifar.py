"""CIFAR-10 and CIFAR-100 from their original files, in the binary layout or the python (pickle) one.

A binary file is a sequence of records: one label byte (CIFAR-100: a coarse one, then a fine one), then 3 × 32 × 32
bytes of pixels. A pickle is a dict with the pixels as an array, one row per image, and the labels as a list. Files may
hold fewer images than the originals, so that a subset is a data set too, but never more.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from decomposable.data import folders
from decomposable.data.augment import PadCropFlip, PerChannel, Standardise
from decomposable.data.base import Images, InMemory
from decomposable.data.pickles import load_plain
from decomposable_edge.errors import DataError

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR100_MEAN, CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


class _Files(NamedTuple):
    """How a layout names its files."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]


class _Cifar(NamedTuple):
    """What tells the two sets apart."""

    name: str
    classes: int
    label_bytes: int  # at the head of a binary record; the last of them is the label
    label_key: str  # in a pickled dict
    largest: int  # images in the largest file
    binary: _Files
    pickled: _Files

    @property
    def description(self) -> str:
        return (
            f"{self.name} ({self.binary.train[0]} … of {self.binary.folder}, "
            f"or {self.pickled.train[0]} … of {self.pickled.folder})"
        )


_CIFAR10 = _Cifar(
    name="CIFAR-10",
    classes=10,
    label_bytes=1,
    label_key="labels",
    largest=10_000,
    binary=_Files("cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",)),
    pickled=_Files("cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",)),
)
_CIFAR100 = _Cifar(
    name="CIFAR-100",
    classes=100,
    label_bytes=2,
    label_key="fine_labels",
    largest=50_000,
    binary=_Files("cifar-100-binary", ("train.bin",), ("test.bin",)),
    pickled=_Files("cifar-100-python", ("train",), ("test",)),
)


def load_cifar10(
    folder: Path | str | None, *, mean: PerChannel = CIFAR10_MEAN, std: PerChannel = CIFAR10_STD
) -> InMemory:
    """CIFAR-10 from a folder with its files, or with the folder `cifar-10-batches-bin` or `cifar-10-batches-py`."""
    return _load(_CIFAR10, folder, Standardise.of(mean, std, channels=3))


def load_cifar100(
    folder: Path | str | None, *, mean: PerChannel = CIFAR100_MEAN, std: PerChannel = CIFAR100_STD
) -> InMemory:
    """CIFAR-100 (fine labels) from a folder with its files, or with `cifar-100-binary` or `cifar-100-python` in it."""
    return _load(_CIFAR100, folder, Standardise.of(mean, std, channels=3))


def _load(cifar: _Cifar, folder: Path | str | None, standardise: Standardise) -> InMemory:
    place, files = _find(cifar, folders.given(folder, cifar.description, SOURCE))
    folders.all_there(place, files.train + files.test, SOURCE)
    read = _read_binary if files is cifar.binary else _read_pickle
    train, test = (_join([read(cifar, place / name) for name in part]) for part in (files.train, files.test))
    return InMemory(
        classes=cifar.classes, train=train, test=test, augment=PadCropFlip(standardise), prepare=standardise
    )


def _find(cifar: _Cifar, folder: Path) -> tuple[Path, _Files]:
    """Where the files are, and in which layout; the binary one where there are both, as it needs no unpickling."""
    for files in (cifar.binary, cifar.pickled):
        for place in (folder, folder / files.folder):
            if any((place / name).is_file() for name in files.train + files.test):
                return place, files
    raise folders.none_there(folder, cifar.name, cifar.description, SOURCE)


def _read_binary(cifar: _Cifar, file: Path) -> tuple[np.ndarray, np.ndarray]:
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


def _read_pickle(cifar: _Cifar, file: Path) -> tuple[np.ndarray, np.ndarray]:
    # Beside the pixels, an image takes about 32 bytes (the originals have the names of the photographs too).
    content = load_plain(file, limit=cifar.largest * (PIXELS + 128))
    missing = [key for key in ("data", cifar.label_key) if key not in content]
    if missing:
        raise DataError(f"{file}: no {missing[0]!r} in it; allowed: a file of {cifar.name}")
    rows, labels = content["data"], content[cifar.label_key]
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != PIXELS:
        came = f"{rows.dtype} of shape {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise DataError(f"{file}: 'data' is {came}; allowed: an array of bytes, images × {PIXELS:,}")
    if isinstance(labels, np.ndarray):
        labels = labels.tolist()
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(f"{file}: {cifar.label_key!r} is not a list of ints")
    if not 1 <= len(rows) <= cifar.largest or len(labels) != len(rows):
        raise DataError(
            f"{file}: {len(rows):,} images and {len(labels):,} labels; "
            f"allowed: from 1 to {cifar.largest:,}, as many of one as of the other"
        )
    # As Python ints: one that no int64 holds must get the same clear line.
    folders.check_labels(file, np.array(labels, dtype=object), cifar.classes)
    return rows, np.array(labels, dtype=np.int64)


def _join(parts: list[tuple[np.ndarray, np.ndarray]]) -> Images:
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Images(torch.from_numpy(pixels).view(-1, *SHAPE), torch.from_numpy(labels))
