"""Fashion-MNIST: 60,000 + 10,000 grey images of 28 × 28 in ten classes of clothing, in four idx files.

The idx format of the MNIST family is a big-endian header, then bytes; gzipped or not. The header is a number that means
bytes of so many dimensions (2051 for images, 2049 for labels), then the size of each dimension, four bytes each.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from decomposable.data import folders
from decomposable.data.augment import PadCropFlip, PerChannel, Standardise
from decomposable.data.base import Images, InMemory
from decomposable_edge.errors import DataError

MEAN, STD = (0.2860,), (0.3530,)
CLASSES = 10
SOURCE = "https://github.com/zalandoresearch/fashion-mnist or Debian's package dataset-fashion-mnist"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_NAMES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
_WHAT = "Fashion-MNIST (train-images-idx3-ubyte …, gzipped or not)"


def load(folder: Path | str | None, *, mean: PerChannel = MEAN, std: PerChannel = STD) -> InMemory:
    """Load it from a folder with its files, or with the folder `fashion-mnist`; None is where Debian has it."""
    standardise = Standardise.of(mean, std, channels=1)
    if folder is None and DEBIAN_FOLDER.is_dir():
        folder = DEBIAN_FOLDER
    inside = ("fashion-mnist", "dataset-fashion-mnist")
    files = folders.find(folder, _NAMES, inside=inside, what=_WHAT, source=SOURCE, ending=".gz")
    train, test = _read(*files[:2], most=60_000), _read(*files[2:], most=10_000)
    augment = PadCropFlip(standardise, padding=2)
    return InMemory(classes=CLASSES, train=train, test=test, augment=augment, prepare=standardise)


def _read(images_file: Path, labels_file: Path, *, most: int) -> Images:
    pixels = read_idx(images_file, shape=(28, 28), most=most)
    labels = read_idx(labels_file, shape=(), most=most)
    if len(labels) != len(pixels):
        allowed = f"{len(pixels):,}, as many as images in {images_file.name}"
        raise DataError.of(labels_file, f"{len(labels):,} labels; allowed: {allowed}")
    return folders.labelled(pixels[:, None], labels, CLASSES, labels_file)


def read_idx(file: Path, *, shape: tuple[int, ...], most: int) -> np.ndarray:
    """Read an array of 1 to `most` items of this shape; no more is inflated than such a header can claim."""
    head, magic = 4 * (2 + len(shape)), 0x0801 + len(shape)
    allowed = f"allowed: an idx file whose header is {[magic, f'1 to {most}', *shape]}"
    try:
        with file.open("rb") as raw:
            is_gzipped = raw.read(2) == b"\x1f\x8b"  # and not by name: browsers unpack some downloads and keep theirs
            raw.seek(0)
            with gzip.open(raw) if is_gzipped else raw as stream:
                header = np.frombuffer(stream.read(head).ljust(head, b"\0"), dtype=">u4").tolist()
                if header[0] != magic or not 1 <= header[1] <= most or tuple(header[2:]) != shape:
                    raise DataError.of(file, f"its header is {header}; {allowed}")
                expected = math.prod(header[1:])
                content = stream.read(expected + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError.of(file, f"cannot be read ({error})") from error
    if len(content) != expected:
        came = f"only {len(content):,}" if len(content) < expected else "more"
        raise DataError.of(file, f"its header says {expected:,} bytes and {came} follow; {allowed}")
    return np.frombuffer(content, dtype=np.uint8).reshape(header[1:]).copy()  # a copy can be written to
