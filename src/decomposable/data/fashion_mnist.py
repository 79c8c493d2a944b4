"""Fashion-MNIST: 60,000 + 10,000 grey images of 28 × 28 in ten classes of clothing, in four idx files.

The idx format of the MNIST family is a big-endian header, then bytes; gzipped or not. The header is 00 00 08 (bytes)
and the number of dimensions, which is 2051 for images and 2049 for labels, then the size of each dimension in four
bytes.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch

from decomposable.data import folders
from decomposable.data.augment import PadCropFlip, PerChannel, Standardise
from decomposable.data.base import Images, InMemory
from decomposable_edge.errors import DataError

MEAN, STD = (0.2860,), (0.3530,)
CLASSES = 10
SHAPE = (28, 28)
PADDING = 2
SOURCE = "https://github.com/zalandoresearch/fashion-mnist or Debian's package dataset-fashion-mnist"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
SUBFOLDERS = ("fashion-mnist", "dataset-fashion-mnist")
_NAMES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
_WHAT = "Fashion-MNIST (train-images-idx3-ubyte …, gzipped or not)"
_BYTES = 0x08
_GZIP = b"\x1f\x8b"


def load(folder: Path | str | None, *, mean: PerChannel = MEAN, std: PerChannel = STD) -> InMemory:
    """Fashion-MNIST from a folder with its files, or with the folder `fashion-mnist`; None is where Debian has it."""
    standardise = Standardise.of(mean, std, channels=1)
    if folder is None and DEBIAN_FOLDER.is_dir():
        folder = DEBIAN_FOLDER
    place = _find(folders.given(folder, _WHAT, SOURCE))
    files = folders.all_there(place, [_choose(place, name).name for name in _NAMES], SOURCE)
    train, test = _read(*files[:2], most=60_000), _read(*files[2:], most=10_000)
    return InMemory(
        classes=CLASSES, train=train, test=test, augment=PadCropFlip(standardise, PADDING), prepare=standardise
    )


def _choose(place: Path, name: str) -> Path:
    """The file as it is there; the gzipped name, which is the published one, where it is not."""
    return place / name if (place / name).is_file() else place / f"{name}.gz"


def _find(folder: Path) -> Path:
    for place in (folder, *(folder / name for name in SUBFOLDERS)):
        if any(_choose(place, name).is_file() for name in _NAMES):
            return place
    raise folders.none_there(folder, "Fashion-MNIST", _WHAT, SOURCE)


def _read(images_file: Path, labels_file: Path, *, most: int) -> Images:
    pixels = read_idx(images_file, shape=SHAPE, most=most)
    labels = read_idx(labels_file, shape=(), most=most)
    if len(labels) != len(pixels):
        raise DataError(
            f"{labels_file}: {len(labels):,} labels; allowed: {len(pixels):,}, as many as images in {images_file.name}"
        )
    folders.check_labels(labels_file, labels, CLASSES)
    return Images(torch.from_numpy(pixels)[:, None], torch.from_numpy(labels.astype(np.int64)))


def read_idx(file: Path, *, shape: tuple[int, ...], most: int) -> np.ndarray:
    """An array of 1 to `most` items of this shape. No more is inflated than such a header can claim."""
    try:
        with file.open("rb") as raw:
            is_gzipped = raw.read(2) == _GZIP  # and not by name: browsers unpack some downloads and keep theirs
            raw.seek(0)
            if not is_gzipped:
                return _parse(raw, file, shape, most)
            with gzip.open(raw) as inflated:
                return _parse(cast(BinaryIO, inflated), file, shape, most)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({error})") from error


def _parse(stream: BinaryIO, file: Path, shape: tuple[int, ...], most: int) -> np.ndarray:
    dimensions = 1 + len(shape)
    magic = _BYTES << 8 | dimensions
    allowed = f"allowed: an idx file ({magic}) of 1 to {most:,} {_times(shape)}"
    size = 4 * (1 + dimensions)
    header = stream.read(size)
    if len(header) < size:
        raise DataError(f"{file}: {len(header)} bytes, shorter than a header; {allowed}")
    found, count, *rest = struct.unpack(f">{1 + dimensions}I", header)
    if found != magic:
        raise DataError(f"{file}: begins with {found}; {allowed}")
    if tuple(rest) != shape or not 1 <= count <= most:
        raise DataError(f"{file}: the header says {count:,} {_times(rest)}; {allowed}")
    expected = int(count * np.prod(shape, dtype=np.int64))
    content = stream.read(expected + 1)
    if len(content) != expected:
        came = f"only {len(content):,}" if len(content) < expected else "more"
        raise DataError(f"{file}: the header says {expected:,} bytes and {came} follow; {allowed}")
    return np.frombuffer(content, dtype=np.uint8).reshape(count, *shape).copy()  # a copy can be written to


def _times(shape: tuple[int, ...] | list[int]) -> str:
    return f"images of {' × '.join(map(str, shape))}" if shape else "labels"
