"""CIFAR-10 and a pretrained ResNet-20 for the benchmarks that need a real network; they say what is missing."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from decomposable import models
from decomposable.data import cifar
from decomposable.data.augment import PadCropFlip, Standardise
from decomposable_edge.errors import DecomposableError

standardise = Standardise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The pretrained network was trained with ImageNet's mean and deviation."""

augment = PadCropFlip(standardise)


def load_cifar10(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images (uint8, NCHW) and labels of "train" or "test"."""
    try:
        data = cifar.load_cifar10(folder)
    except DecomposableError as error:
        sys.exit(str(error))
    images = data.train if split == "train" else data.test
    return images.pixels, images.labels


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the images and the network are, and how many images to calibrate with."""
    parser.add_argument("--data", type=Path, default=default_folder(), help="CIFAR-10 in its binary layout")
    parser.add_argument(
        "--weights", type=Path, default=default_folder() / "resnet20.th", help="state dict of ResNet-20"
    )
    parser.add_argument("--images", type=int, default=1000, help="training images to calibrate with")


def calibration_batches(folder: Path, count: int) -> list[Tensor]:
    """So many training images, augmented; the same ones every time."""
    images, _ = load_cifar10(folder, "train")
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(images), generator=generator)[:count]
    return [augment(images[part], generator) for part in chosen.split(250)]


def pretrained_resnet20(file: Path) -> nn.Module:
    """The ResNet-20 whose state dict has keys that start with `module.`"""
    if not file.is_file():
        sys.exit(f"--weights {file}: not there; allowed: the state dict of a CIFAR-10 ResNet-20")
    state = torch.load(file, map_location="cpu", weights_only=True)["state_dict"]
    model = models.resnet20(num_classes=10)
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    return model.eval()


@torch.inference_mode()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor, batch_size: int = 500) -> float:
    """Percent right in eval mode."""
    net.eval()
    right = sum(
        int((net(standardise(x)).argmax(1) == y).sum())
        for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True)
    )
    return 100 * right / len(images)


def default_folder() -> Path:
    return Path(os.environ.get("DECOMPOSABLE_DATA", "data"))
