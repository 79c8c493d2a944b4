"""CIFAR-10 and CIFAR-100 from their original files, in the binary layout.

A file is a sequence of records: one label byte (CIFAR-100: a coarse one, then a fine one), then 3 × 32 × 32 bytes of
pixels. It may hold fewer images than the original, so that a subset is a data set too, but never more. The python
version is not read: its files are pickles, which can run code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from decomposable.data import folders
from decomposable.data.augment import PadCropFlip, PerChannel, Standardise
from decomposable.data.base import Images, InMemory
from decomposable_edge.errors import DataError

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR100_MEAN, CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
PIXELS = 3 * 32 * 32


def load_cifar10(
    folder: Path | str | None, *, mean: PerChannel = CIFAR10_MEAN, std: PerChannel = CIFAR10_STD
) -> InMemory:
    """Load CIFAR-10 from a folder with its binary files, or with the folder `cifar-10-batches-bin`."""
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    return _load(folder, "cifar-10-batches-bin", names, 10, Standardise.of(mean, std, channels=3))


def load_cifar100(
    folder: Path | str | None, *, mean: PerChannel = CIFAR100_MEAN, std: PerChannel = CIFAR100_STD
) -> InMemory:
    """Load CIFAR-100 (fine labels) from a folder with its binary files, or with the folder `cifar-100-binary`."""
    return _load(folder, "cifar-100-binary", ["train.bin", "test.bin"], 100, Standardise.of(mean, std, channels=3))


def _load(
    folder: Path | str | None, usual: str, names: Sequence[str], classes: int, standardise: Standardise
) -> InMemory:
    what = f"the binary version of CIFAR-{classes} ({names[0]} … of {usual}; not the python version, which is pickles)"
    files = folders.find(folder, names, inside=[usual], what=what, source=SOURCE)
    *train, test = (_read(file, classes) for file in files)
    joined = Images(*(torch.cat(each) for each in zip(*((x.pixels, x.labels) for x in train), strict=True)))
    augment = PadCropFlip(standardise)
    return InMemory(classes=classes, train=joined, test=test, augment=augment, prepare=standardise)


def _read(file: Path, classes: int) -> Images:
    label_bytes, most = (1, 10_000) if classes == 10 else (2, 50_000)  # the last byte is the label
    record = label_bytes + PIXELS
    try:
        with file.open("rb") as stream:
            content = stream.read(most * record + 1)
    except OSError as error:
        raise DataError.of(file, f"cannot be read ({error.strerror or error})") from error
    if not 1 <= len(content) <= most * record or len(content) % record:
        size = file.stat().st_size
        raise DataError.of(file, f"{size:,} bytes; allowed: 1 to {most:,} records of {record:,} bytes")
    rows = np.frombuffer(bytearray(content), dtype=np.uint8).reshape(-1, record)
    return folders.labelled(rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1], classes, file)
