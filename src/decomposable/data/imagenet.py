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
from itertools import accumulate
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
    """The images of a folder with `train` and `val`; crops are `size` × `size`.

    A test image is the middle of one whose short side is `resize`.
    """
    if not 1 <= size <= resize:
        raise InvalidArgumentError(f"size={size}, resize={resize}; allowed: ints with 1 ≤ size ≤ resize")
    standardise = Standardise.of(mean, std, channels=3)
    _pillow()  # say at once what is missing
    root = folders.given(folder, _WHAT, SOURCE)
    for part in ("train", "val"):
        if not (root / part).is_dir():
            raise DataError(f"--data {root}: no folder {part!r} in it; allowed: {_WHAT}; to be had from {SOURCE}")
    names = _class_names(root / "train")
    _check_same_classes(root, names, _class_names(root / "val"))
    return ImageFolders(
        class_names=names,
        train=ImageFiles.scan(root / "train", names),
        test=ImageFiles.scan(root / "val", names),
        size=size,
        resize=resize,
        augment=FlipJitterLighting(standardise),
        prepare=standardise,
    )


class ImageFiles:
    """The image files of class folders with their labels.

    The names are in one string and not in a list: 1.3 million objects would be copied into every worker process, little
    by little, as their reference counts change.
    """

    def __init__(self, folder: Path, class_names: Sequence[str], files: Sequence[Sequence[str]]) -> None:
        self.folder, self.class_names = folder, tuple(class_names)
        encoded = [os.fsencode(name) for names in files for name in names]
        self._names = b"".join(encoded)
        self._ends = np.fromiter(accumulate(map(len, encoded), initial=0), dtype=np.int64)
        self.labels = torch.repeat_interleave(torch.tensor([len(names) for names in files]))

    @classmethod
    def scan(cls, folder: Path, class_names: Sequence[str]) -> ImageFiles:
        """All images in these subfolders, in the order of their names."""
        return cls(folder, class_names, [_image_names(folder / name) for name in class_names])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Path:
        name = os.fsdecode(self._names[self._ends[index] : self._ends[index + 1]])
        return self.folder / self.class_names[int(self.labels[index])] / name


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageFolders(TwoParts):
    """A data set whose images stay on disk, in class folders. Classes are numbered in the order of their names."""

    class_names: tuple[str, ...]
    train: ImageFiles
    test: ImageFiles
    size: int
    resize: int
    augment: FlipJitterLighting
    prepare: Standardise

    @property
    def classes(self) -> int:
        """How many there are."""
        return len(self.class_names)

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """Random crops of these training images, augmented."""
        return self.train_part(indices, generator, slice(None))

    def train_part(self, indices: Tensor, generator: torch.Generator, part: slice) -> Batch:
        """A part of such a batch, of which no other image is read."""
        files = [self.train[i] for i in indices[part].tolist()]
        sizes_N2 = torch.ones(len(indices), 2, dtype=torch.long)  # of the others, no size changes what is drawn
        sizes_N2[part] = torch.tensor([_size_of(file) for file in files])
        boxes_N4 = random_boxes(sizes_N2, generator)[part]
        pixels = _decode(files, boxes_N4.tolist(), self.size, draft=True)
        return self.augment(pixels, Drawing(generator, len(indices), part)), self.train.labels[indices[part]]

    def test_batch(self, indices: Tensor) -> Batch:
        """The middles of these test images."""
        files = [self.test[i] for i in indices.tolist()]
        boxes = (central_box(*_size_of(file), resize=self.resize, size=self.size) for file in files)
        pixels = _decode(files, boxes, self.size, draft=False)
        return self.prepare(pixels), self.test.labels[indices]


def _class_names(folder: Path) -> tuple[str, ...]:
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(".")]
    names = sorted(name for name, is_dir in found if is_dir)
    if not names:
        images = sum(name.lower().endswith(EXTENSIONS) for name, _ in found)
        came = f"{images:,} images and no class folders" if images else "no class folders"
        raise DataError(f"{folder}: {came}; allowed: one folder per class, with its images in it")
    return tuple(names)


def _check_same_classes(root: Path, train: Sequence[str], test: Sequence[str]) -> None:
    only = {"train": sorted(set(train) - set(test)), "val": sorted(set(test) - set(train))}
    differences = [f"only {part} has {folders.listed(names)}" for part, names in only.items() if names]
    if differences:
        raise DataError(f"--data {root}: {'; '.join(differences)}; allowed: the same class folders in train and val")


def _image_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:  # tells files from folders with no further system call
        files = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file()]
    names = [name for name in files if name.lower().endswith(EXTENSIONS)]
    if not names:
        raise DataError(f"{folder}: no image in it; allowed: at least one of {', '.join(EXTENSIONS)}")
    return sorted(names)


def _pillow() -> ModuleType:
    try:
        from PIL import Image  # optional: here, so that importing this module needs no Pillow
    except ImportError as error:
        raise MissingExtraError.of("Pillow", "images") from error
    return Image


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """An image whose size is known and whose pixels are not decoded yet; what it takes is free again afterwards."""
    images = _pillow()
    try:
        with file.open("rb") as stream, warnings.catch_warnings():
            warnings.simplefilter("error", images.DecompressionBombWarning)  # at half of what Pillow refuses itself
            with images.open(stream, formats=_FORMATS) as image:
                yield image
    except Exception as error:  # decoders raise almost anything when a file is broken
        text = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{file}: cannot be read as an image ({text})") from error


def _size_of(file: Path) -> tuple[int, int]:
    """Width and height, for which the head of a file is enough."""
    with _opened(file) as image:
        size: tuple[int, int] = image.size
        return size


def _decode(files: Sequence[Path], boxes: Iterable[Sequence[float]], size: int, *, draft: bool) -> Tensor:
    """These boxes of the images, each resized to `size` × `size`, as bytes: N × 3 × size × size.

    One original at a time is in memory: of 256 photographs, they would take gigabytes.
    """
    pixels = np.empty((len(files), size, size, 3), dtype=np.uint8)
    for file, box, out in zip(files, boxes, pixels, strict=True):
        with _opened(file) as image:
            out[:] = _cut(image, box, size, draft)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _cut(image: Any, box: Sequence[float], size: int, draft: bool) -> Any:
    """A box of the image, resized with antialiasing.

    By Pillow and not by F.interpolate: measured on photographs of 500 × 375 both take about 0.7 ms, and Pillow's is the
    filter that published accuracies are with. Orientation tags are left alone, as they are there.

    With `draft`, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, which takes less time. At least twice the final
    size is left to the filter, so that pixels differ by some grey values: fine to train with, not to compare with.
    """
    left, top, right, bottom = box
    width, height = image.size
    if draft:  # formats other than JPEG take no notice
        image.draft(None, (ceil(2 * size * width / (right - left)), ceil(2 * size * height / (bottom - top))))
    if image.mode.startswith(("I", "F")):  # Pillow would make white of everything above 255
        raise ValueError(f"mode {image.mode}; allowed: 8 bits per channel")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns where this step is left out
    if image.mode != "RGB":
        image = image.convert("RGB")
    x, y = image.width / width, image.height / height
    # Rounding must not take the box over the edge, which Pillow refuses.
    box = (left * x, top * y, min(right * x, image.width), min(bottom * y, image.height))
    return image.resize((size, size), _pillow().Resampling.BILINEAR, box=box)
