"""Augmentation of whole batches: tensor code, deterministic under the generator that is handed in.

Shapes: N images, C channels, H × W pixels. Bytes come in and stay bytes as long as possible; padding happens there, in
pixel space, so that a padded pixel is black. (Padding after standardising pads with the mean colour, which shifts what
batch normalisation sees.) What ends with _ changes its argument: new memory for large images takes most of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from decomposable_edge.errors import InvalidArgumentError

PerChannel = tuple[float, ...]


@dataclass(frozen=True)
class Drawing:
    """Draw random numbers for each of `count` images, and keep those of one `part` of them.

    So an image is augmented in the same way alone and with its whole batch.
    """

    generator: torch.Generator
    count: int
    part: slice = field(default_factory=lambda: slice(None))

    @classmethod
    def of(cls, generator: torch.Generator | Drawing, count: int) -> Drawing:
        """Draw from a generator, for a whole batch of `count` images."""
        return generator if isinstance(generator, Drawing) else cls(generator, count)

    def uniform(self, *shape: int) -> Tensor:
        """Draw numbers from 0 to 1, in this shape for each image."""
        return torch.rand(self.count, *shape, generator=self.generator)[self.part]

    def normal(self, *shape: int) -> Tensor:
        """Draw numbers with mean 0 and deviation 1."""
        return torch.randn(self.count, *shape, generator=self.generator)[self.part]

    def places(self, below: int) -> Tensor:
        """Draw two whole numbers from 0 to below a limit: rows of 2 × N."""
        return torch.randint(0, below, (2, self.count), generator=self.generator)[:, self.part]


@dataclass(frozen=True)
class Standardise:
    """Turn bytes into floats with mean 0 and deviation 1 per channel: (x / 255 − mean) / std."""

    mean: PerChannel
    std: PerChannel

    @classmethod
    def of(cls, mean: PerChannel, std: PerChannel, *, channels: int) -> Standardise:
        """Check that both have a value for every channel."""
        for option, values, least, kind in (("mean", mean, -math.inf, "finite"), ("std", std, 0, "positive")):
            if len(values) != channels or not all(least < value < math.inf for value in values):
                raise InvalidArgumentError.about(option, values, f"{channels} {kind} numbers, one per channel")
        return cls(mean, std)

    def __call__(self, x_NCHW: Tensor) -> Tensor:
        """Standardise a batch."""
        return self.apply_(x_NCHW.to(torch.float32, copy=True))

    def apply_(self, x_NCHW: Tensor) -> Tensor:
        """Standardise a batch of floats from 0 to 255 in place."""
        mean, std = (torch.tensor(v, device=x_NCHW.device).view(-1, 1, 1) for v in (self.mean, self.std))
        return x_NCHW.sub_(255 * mean).div_(255 * std)


@dataclass(frozen=True)
class PadCropFlip:
    """Zero-pad in pixel space, crop at random to the old size, flip left and right at random, then standardise."""

    standardise: Standardise
    padding: int = 4
    flip: bool = True

    def __call__(self, x_NCHW: Tensor, generator: torch.Generator | Drawing) -> Tensor:
        """Augment a batch."""
        x_NCHW = pad_and_crop(x_NCHW, self.padding, generator)
        return self.standardise(random_flip(x_NCHW, generator) if self.flip else x_NCHW)


@dataclass(frozen=True)
class FlipJitterLighting:
    """Augment as for ImageNet: flip left and right at random, jitter the colours, add PCA lighting, then standardise.

    Images come in cropped and resized: that is done as they are decoded, when they still differ in size.
    """

    standardise: Standardise
    strength: float = 0.4
    lighting_std: float = 0.1

    def __call__(self, x_NCHW: Tensor, generator: torch.Generator | Drawing) -> Tensor:
        """Augment a batch of RGB images."""
        x_NCHW = random_flip(x_NCHW, generator).to(torch.float32)  # random_flip has made a copy
        colour_jitter_(x_NCHW, self.strength, generator)
        return self.standardise.apply_(lighting_(x_NCHW, self.lighting_std, generator))


def pad_and_crop(x_NCHW: Tensor, padding: int, generator: torch.Generator | Drawing) -> Tensor:
    """Put zeros around every image, then cut a window of the old size at a random place."""
    count, _, height, width = x_NCHW.shape
    dy, dx = Drawing.of(generator, count).places(2 * padding + 1).to(x_NCHW.device)
    padded = F.pad(x_NCHW, (padding, padding, padding, padding))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # N × C × places × places × H × W, a view
    return windows[torch.arange(count, device=x_NCHW.device), :, dy, dx]


def random_flip(x_NCHW: Tensor, generator: torch.Generator | Drawing) -> Tensor:
    """Exchange left and right, for each image with probability ½."""
    flip_N = Drawing.of(generator, len(x_NCHW)).uniform().to(x_NCHW.device) < 0.5
    return torch.where(flip_N[:, None, None, None], x_NCHW.flip(3), x_NCHW)


# What ITU-R 601-2 takes from red, green and blue for a grey value, as do Pillow and torchvision.
_GREY = (0.299, 0.587, 0.114)
_CONTRAST, _SATURATION = 1, 2  # 0 is brightness


def colour_jitter_(x_NCHW: Tensor, strength: float, generator: torch.Generator | Drawing) -> Tensor:
    """Multiply brightness, contrast and saturation of RGB floats by factors from 1 − strength to 1 + strength.

    Every image has its own factors and its own order of the three. Each of them blends the image with another one, by
    factor · image + (1 − factor) · other: with black for brightness, with the mean of its grey values for contrast,
    with its grey values for saturation. So one blend per turn serves the whole batch. Values stay from 0 to 255.
    """
    count, device = len(x_NCHW), x_NCHW.device
    drawing = Drawing.of(generator, count)
    factors_N3 = (1 + strength * (2 * drawing.uniform(3) - 1)).to(device)
    order_N3 = drawing.uniform(3).argsort(1).to(device)
    grey_C, x_NCP = torch.tensor(_GREY, device=device), x_NCHW.view(count, 3, -1)
    for turn_N1 in order_N3.split(1, dim=1):
        grey_N1P = (grey_C @ x_NCP)[:, None]
        mean_N11, turn_N11 = grey_N1P.mean(2, keepdim=True), turn_N1[:, :, None]
        other_N1P = grey_N1P.mul_(turn_N11 == _SATURATION).add_(mean_N11 * (turn_N11 == _CONTRAST))
        x_NCP.lerp_(other_N1P, 1 - factors_N3.gather(1, turn_N1)[:, :, None]).clamp_(0, 255)
    return x_NCHW


# Of the colours of ImageNet's pixels on a scale from 0 to 1 (AlexNet's; the figures are those of fb.resnet.torch).
EIGENVALUES = (0.2175, 0.0188, 0.0045)
EIGENVECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))  # columns


def lighting_(x_NCHW: Tensor, std: float, generator: torch.Generator | Drawing) -> Tensor:
    """Add AlexNet's noise to RGB floats from 0 to 255: every image moves along the principal components of colour.

    The increment is on the scale of its eigenvalues, 0 to 1, and so 255 times that here. Nothing is clipped.
    """
    alpha_N3 = std * Drawing.of(generator, len(x_NCHW)).normal(3)
    shift_NC = (alpha_N3 * torch.tensor(EIGENVALUES)) @ torch.tensor(EIGENVECTORS).T
    return x_NCHW.add_(255 * shift_NC.to(x_NCHW.device)[:, :, None, None])


_TRIES, _ASPECT = 10, (3 / 4, 4 / 3)


def random_boxes(sizes_N2: Tensor, generator: torch.Generator, *, scale: tuple[float, float] = (0.08, 1.0)) -> Tensor:
    """Return where to crop images of these sizes (width, height): left, top, right, bottom, whole pixels, N × 4.

    A box has a share `scale` of the area, uniform, and an aspect (width to height) from 3:4 to 4:3, uniform in its
    logarithm. The first of ten tries that fits is taken; where none does, the largest box in the middle.
    """
    width_N, height_N = sizes_N2.double().unbind(1)
    count = len(sizes_N2)
    area_TN, log_aspect_TN, place_N2 = (
        torch.rand(*shape, generator=generator, dtype=torch.float64)
        for shape in ((_TRIES, count), (_TRIES, count), (count, 2))
    )
    area_TN = (scale[0] + (scale[1] - scale[0]) * area_TN) * width_N * height_N
    low, high = map(math.log, _ASPECT)
    aspect_TN = (low + (high - low) * log_aspect_TN).exp()
    tried_TN2 = torch.stack([(area_TN * aspect_TN).sqrt().round(), (area_TN / aspect_TN).sqrt().round()], dim=2)
    fits_TN = ((tried_TN2 >= 1) & (tried_TN2 <= sizes_N2)).all(2)

    largest_N2 = torch.stack([(height_N * _ASPECT[1]).round(), (width_N / _ASPECT[0]).round()], dim=1)
    largest_N2 = largest_N2.clamp_min(1).minimum(sizes_N2.double())
    found_N1, first_N = fits_TN.any(0)[:, None], fits_TN.int().argmax(0)
    box_N2 = torch.where(found_N1, tried_TN2[first_N, torch.arange(count)], largest_N2)
    room_N2 = sizes_N2 - box_N2
    corner_N2 = torch.where(found_N1, place_N2 * (room_N2 + 1), room_N2 / 2).floor()
    return torch.cat([corner_N2, corner_N2 + box_N2], dim=1).long()


def central_box(width: int, height: int, *, resize: int, size: int) -> tuple[float, float, float, float]:
    """Return which box of an image is its middle `size` × `size` once its short side is resized to `resize`.

    In pixels of the image as it is: left, top, right, bottom.

    >>> central_box(512, 256, resize=256, size=224)
    (144.0, 16.0, 368.0, 240.0)
    """
    resized = [int(resize * side / min(width, height)) for side in (width, height)]  # cut off as torchvision does
    left, top = (round((side - size) / 2) for side in resized)
    per_x, per_y = width / resized[0], height / resized[1]
    return left * per_x, top * per_y, (left + size) * per_x, (top + size) * per_y
