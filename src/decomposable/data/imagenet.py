"""ImageNet, or any set of images in class folders: train/CLASS/*.JPEG and val/CLASS/*.JPEG.

Images are decoded, cropped and resized one by one, as they differ in size, and no original is kept; the rest is tensor
code on the whole batch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decomposable.data import folders
from decomposable.data.augment import Drawing, FlipJitterLighting, PerChannel, Standardise, central_box, random_boxes
from decomposable.data.base import Batch, TwoParts
from decomposable_edge.errors import DataError, InvalidArgumentError, MissingExtraError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SOURCE = "https://www.image-net.org/download.php"
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")  # no other decoder of Pillow is tried: some start programs
_WHAT = "class folders of images, train/CLASS/*.JPEG and val/CLASS/*.JPEG"


def load(
    folder: Path | str | None, *, size: int = 224, mean: PerChannel = MEAN, std: PerChannel = STD, resize: int = 256
) -> ImageFolders:
    """Load the images of a folder with `train` and `val`; crops are `size` × `size`.

    A test image is the middle of one whose short side is `resize`.
    """
    if not 1 <= size <= resize:
        raise InvalidArgumentError.about("size", size, f"an int from 1 to resize={resize}")
    standardise = Standardise.of(mean, std, channels=3)
    _pillow()  # say at once what is missing
    root = folders.given(folder, _WHAT, SOURCE)
    train, val = (_class_names(root, part) for part in ("train", "val"))
    only = {"train": sorted({*train} - {*val}), "val": sorted({*val} - {*train})}
    differences = [f"only {part} has {folders.listed(classes)}" for part, classes in only.items() if classes]
    if differences:
        raise DataError(f"--data {root}: {'; '.join(differences)}; allowed: the same class folders in train and val")
    parts = ImageFiles(root / "train", train), ImageFiles(root / "val", val)
    return ImageFolders(*parts, size, resize, FlipJitterLighting(standardise), standardise)


def _class_names(root: Path, part: str) -> list[str]:
    folder = root / part
    if not folder.is_dir():
        raise DataError(f"--data {root}: no folder {part!r} in it; allowed: {_WHAT}; to be had from {SOURCE}")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise DataError.of(folder, "no class folders; allowed: one folder per class, with its images in it")
    return names


class ImageFiles:
    """Hold the names of the image files of class folders, sorted, and their labels.

    The names are in one array of bytes and not in a list: 1.3 million objects would be copied into every worker
    process, little by little, as their reference counts change.
    """

    def __init__(self, folder: Path, class_names: Sequence[str]) -> None:
        self.folder, self.class_names = folder, tuple(class_names)
        files = [_image_names(folder / name) for name in class_names]
        self._names = np.array([os.fsencode(name) for names in files for name in names])
        self.labels = torch.repeat_interleave(torch.tensor([len(names) for names in files]))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Path:
        return self.folder / self.class_names[int(self.labels[index])] / os.fsdecode(self._names[index])


def _image_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:  # tells files from folders with no further system call
        files = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file()]
    names = sorted(name for name in files if name.lower().endswith(EXTENSIONS))
    if not names:
        raise DataError.of(folder, f"no image in it; allowed: at least one of {', '.join(EXTENSIONS)}")
    return names


@dataclass(frozen=True, eq=False)
class ImageFolders(TwoParts):
    """Read images from class folders as they are needed. Classes are numbered in the order of their names."""

    train: ImageFiles
    test: ImageFiles
    size: int
    resize: int
    augment: FlipJitterLighting
    prepare: Standardise

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return len(self.train.class_names)

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """Return random crops of these training images, augmented."""
        return self.train_part(indices, generator, slice(None))

    def train_part(self, indices: Tensor, generator: torch.Generator, part: slice) -> Batch:
        """Return a part of such a batch and read no other image of it."""
        files = [self.train[i] for i in indices[part].tolist()]
        sizes_N2 = torch.ones(len(indices), 2, dtype=torch.long)  # of the others, no size changes what is drawn
        sizes_N2[part] = torch.tensor([_size_of(file) for file in files])
        boxes_N4 = random_boxes(sizes_N2, generator)[part]
        pixels = _decode(files, boxes_N4.tolist(), self.size, draft=True)
        return self.augment(pixels, Drawing(generator, len(indices), part)), self.train.labels[indices[part]]

    def test_batch(self, indices: Tensor) -> Batch:
        """Return the middles of these test images."""
        files = [self.test[i] for i in indices.tolist()]
        boxes = (central_box(*_size_of(file), resize=self.resize, size=self.size) for file in files)
        return self.prepare(_decode(files, boxes, self.size, draft=False)), self.test.labels[indices]


def _pillow() -> ModuleType:
    try:
        from PIL import Image  # optional: here, so that importing this module needs no Pillow
    except ImportError as error:
        raise MissingExtraError.of("Pillow", "images") from error
    return Image


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open an image, whose size is then known and whose pixels are not decoded yet."""
    images = _pillow()
    try:
        with file.open("rb") as stream, warnings.catch_warnings():
            warnings.simplefilter("error", images.DecompressionBombWarning)  # at half of what Pillow refuses itself
            with images.open(stream, formats=_FORMATS) as image:
                yield image
    except Exception as error:  # decoders raise almost anything when a file is broken
        text = " ".join(str(error).split()) or type(error).__name__
        raise DataError.of(file, f"cannot be read as an image ({text})") from error


def _size_of(file: Path) -> tuple[int, int]:
    with _opened(file) as image:
        size: tuple[int, int] = image.size
        return size


def _decode(files: Sequence[Path], boxes: Iterable[Sequence[float]], size: int, *, draft: bool) -> Tensor:
    """Return these boxes of the images, each resized to `size` × `size`, as bytes: N × 3 × size × size.

    One original at a time is in memory: of 256 photographs, they would take gigabytes.
    """
    pixels = np.empty((len(files), size, size, 3), dtype=np.uint8)
    for file, box, out in zip(files, boxes, pixels, strict=True):
        with _opened(file) as image:
            out[:] = _cut(image, box, size, draft)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _cut(image: Any, box: Sequence[float], size: int, draft: bool) -> Any:
    """Return a box of the image, resized with antialiasing by Pillow, whose filter published accuracies come from.

    Orientation tags are ignored, as they are there. With `draft`, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size,
    which takes less time. At least twice the final size is left to the filter, so that pixels differ by some grey
    values: fine to train with, not to compare with.
    """
    left, top, right, bottom = box
    width, height = image.size
    if draft:  # formats other than JPEG take no notice
        image.draft(None, (ceil(2 * size * width / (right - left)), ceil(2 * size * height / (bottom - top))))
    if image.mode.startswith(("I", "F")):  # Pillow would make white of everything above 255
        raise ValueError(f"mode {image.mode}; allowed: 8 bits per channel")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns where this step is left out
    image = image.convert("RGB")
    x, y = image.width / width, image.height / height
    # Rounding must not take the box over the edge, which Pillow refuses.
    box = (left * x, top * y, min(right * x, image.width), min(bottom * y, image.height))
    return image.resize((size, size), _pillow().Resampling.BILINEAR, box=box)
