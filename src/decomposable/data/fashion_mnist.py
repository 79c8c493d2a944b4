"""Fashion-MNIST: 60,000 + 10,000 grey images of 28 × 28 in ten classes of clothing, in four idx files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from decomposable.data import folders, idx
from decomposable.data.augment import PadCropFlip, Standardise
from decomposable.data.base import Images, InMemory
from decomposable.errors import DataError

MEAN, STD = (0.2860,), (0.3530,)
CLASSES = 10
SHAPE = (28, 28)
PADDING = 2
SOURCE = "https://github.com/zalandoresearch/fashion-mnist or Debian's package dataset-fashion-mnist"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
SUBFOLDERS = ("fashion-mnist", "dataset-fashion-mnist")
_PARTS = {"train": 60_000, "t10k": 10_000}
_WHAT = "Fashion-MNIST (train-images-idx3-ubyte …, gzipped or not)"


def load(folder: Path | str | None, *, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> InMemory:
    """Fashion-MNIST from a folder with its files, or with the folder `fashion-mnist`; None is where Debian has it."""
    standardise = Standardise.of(mean, std, channels=1)
    if folder is None and DEBIAN_FOLDER.is_dir():
        folder = DEBIAN_FOLDER
    place = _find(folders.given(folder, _WHAT, SOURCE))
    files = {name: _choose(place, name) for name in _names()}
    folders.all_there(place, [file.name for file in files.values()], SOURCE)
    train, test = (_read(files[_images(part)], files[_labels(part)], most) for part, most in _PARTS.items())
    return InMemory(
        classes=CLASSES, train=train, test=test, augment=PadCropFlip(standardise, PADDING), prepare=standardise
    )


def _images(part: str) -> str:
    return f"{part}-images-idx3-ubyte"


def _labels(part: str) -> str:
    return f"{part}-labels-idx1-ubyte"


def _names() -> list[str]:
    return [name for part in _PARTS for name in (_images(part), _labels(part))]


def _choose(place: Path, name: str) -> Path:
    """The file as it is there; the gzipped name, which is the published one, where it is not."""
    return place / name if (place / name).is_file() else place / f"{name}.gz"


def _find(folder: Path) -> Path:
    for place in (folder, *(folder / name for name in SUBFOLDERS)):
        if any(_choose(place, name).is_file() for name in _names()):
            return place
    raise DataError(
        f"--data {folder}: no file of Fashion-MNIST in it; allowed: a folder with {_WHAT}, or its parent; "
        f"to be had from {SOURCE}"
    )


def _read(images_file: Path, labels_file: Path, most: int) -> Images:
    pixels = idx.read(images_file, shape=SHAPE, most=most)
    labels = idx.read(labels_file, shape=(), most=most)
    if len(labels) != len(pixels):
        raise DataError(
            f"{labels_file}: {len(labels):,} labels; allowed: {len(pixels):,}, as many as images in {images_file.name}"
        )
    wrong = np.flatnonzero(labels >= CLASSES)
    if len(wrong):
        raise DataError(
            f"{labels_file}: image {wrong[0] + 1:,} has label {labels[wrong[0]]}; allowed: 0 to {CLASSES - 1}"
        )
    return Images(torch.from_numpy(pixels)[:, None], torch.from_numpy(labels.astype(np.int64)))
