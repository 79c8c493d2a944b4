"""What share of a training step goes into its data: CIFAR's augmentation, and ImageNet's with decoding.

The data are made up, so none are needed. Fetching a batch and the step are timed in turn, in one process with the same
threads, as if nothing were prepared ahead; with worker processes (`--workers` of a training) the share is hidden too.
ResNet-50's step on ImageNet is timed with a small batch and counted per image, since a full batch takes minutes here.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from _common import interleave, ratio_of_medians, record, summary, verdict
from torch import Tensor, nn

from decomposable import models
from decomposable.data import cifar, imagenet
from decomposable.data.augment import PadCropFlip, Standardise
from decomposable.data.base import Data, Images, InMemory, TrainBatches

WANTED = 0.05
"""The largest share that is still no bottleneck."""


def made_up_cifar(classes: int, count: int = 10_000) -> InMemory:
    images = Images(torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8), torch.randint(0, classes, (count,)))
    standardise = Standardise(cifar.CIFAR10_MEAN, cifar.CIFAR10_STD)
    return InMemory(classes=classes, train=images, test=images, augment=PadCropFlip(standardise), prepare=standardise)


def made_up_imagenet(folder: Path, count: int) -> imagenet.ImageFolders:
    """JPEGs of ImageNet's usual size, about 500 × 375 and 110 kB."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        (folder / part / "n01").mkdir(parents=True)
        for i in range(count):
            coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), dtype=int)
            noisy = (smooth + rng.integers(-20, 21, smooth.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(folder / part / "n01" / f"{i}.JPEG", quality=93)
    return imagenet.load(folder)


def step_of(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def measure(data: Data, model: nn.Module, batch: int, repeats: int) -> dict[str, float]:
    """Times of fetching a batch and of a plain step with it."""
    batches = TrainBatches(data, batch_size=batch, epochs=1000, seed=0)
    numbers = iter(range(len(batches)))
    x, y = batches[0]
    times = interleave({"data": lambda: batches[next(numbers)], "step": step_of(model.train(), x, y)}, repeats)
    data_ms, step_ms = (summary(times[name])["median_ms"] for name in ("data", "step"))
    return {
        "batch": batch,
        "data_ms": data_ms,
        "step_ms": step_ms,
        "data_us_per_image": 1e3 * data_ms / batch,
        "share": ratio_of_medians(times["data"], times["step"]),
    }


def augmentation_alone(data: imagenet.ImageFolders, batch: int, repeats: int) -> float:
    """Microseconds per image of ImageNet's tensor code, without reading and decoding."""
    pixels = torch.randint(0, 256, (batch, 3, data.size, data.size), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    times = interleave({"augment": lambda: data.augment(pixels, generator)}, repeats)
    return 1e3 * summary(times["augment"])["median_ms"] / batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128, help="CIFAR images in a step")
    parser.add_argument("--imagenet-batch", type=int, default=8, help="ImageNet images in a step")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dry-run", action="store_true", help="record nothing")
    args = parser.parse_args()
    torch.manual_seed(0)

    figures = {
        "resnet20": measure(made_up_cifar(10), models.resnet20(num_classes=10), args.batch, args.repeats),
        "resnet34": measure(made_up_cifar(100), models.resnet34(num_classes=100), args.batch, args.repeats),
    }
    with tempfile.TemporaryDirectory() as folder:
        images = made_up_imagenet(Path(folder), count=4 * args.imagenet_batch)
        model = models.resnet50(num_classes=1000)
        figures["resnet50"] = measure(images, model, args.imagenet_batch, args.repeats)
        alone = augmentation_alone(images, args.imagenet_batch, args.repeats)
        figures["resnet50"]["augmentation_us_per_image"] = alone
    for name, row in figures.items():
        print(
            f"{name}, batch {row['batch']}: step {row['step_ms']:.0f} ms, "
            f"data {row['data_ms']:.1f} ms ({row['data_us_per_image']:.0f} µs per image)"
        )
    print(f"of ImageNet's, flip, jitter, lighting and standardising: {alone:.0f} µs per image; the rest is decoding")
    for name, row in figures.items():
        wanted = f"at most {100 * WANTED:.0f}"
        verdict(f"data, percent of a plain step of {name}", 100 * row["share"], wanted, row["share"] <= WANTED)
    if not args.dry_run:
        record("augmentation", figures)


if __name__ == "__main__":
    main()
