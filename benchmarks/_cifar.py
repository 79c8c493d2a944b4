"""CIFAR-10 and a pretrained ResNet-20 for the benchmarks that need a real network; they say what is missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from decomposable import models

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def load_cifar10(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images (uint8, NCHW) and labels from the binary layout, `data_batch_1.bin` … `test_batch.bin`."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if split == "train" else ["test_batch.bin"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        sys.exit(f"--data {folder}: {missing[0]} is not there; allowed: a folder with CIFAR-10 in its binary layout")
    rows = np.concatenate([np.fromfile(folder / name, dtype=np.uint8).reshape(-1, 3073) for name in names])
    return torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy()), torch.from_numpy(rows[:, 0].astype(np.int64))


def standardise(images: Tensor) -> Tensor:
    return (images.float() / 255 - MEAN) / STD


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Zero-pad by 4 in pixel space, crop at random, flip at random, then standardise."""
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    count = len(images)
    dy, dx = torch.randint(0, 9, (2, count), generator=generator)
    rows = (dy[:, None] + torch.arange(32))[:, None, :, None]
    columns = dx[:, None] + torch.arange(32)
    flip = torch.rand(count, generator=generator) < 0.5
    columns = torch.where(flip[:, None], columns.flip(1), columns)[:, None, None, :]
    crops = padded[torch.arange(count)[:, None, None, None], torch.arange(3)[None, :, None, None], rows, columns]
    return standardise(crops)


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
