"""The three set-ups of the paper (section 4 and appendix D). The defaults of `Settings` are what it has for CIFAR."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from decomposable import models
from decomposable.data import cifar, imagenet
from decomposable.recipes import Task
from decomposable.recipes.settings import Settings

CIFAR10 = Settings(ratio=(0.01, 0.25), mean=cifar.CIFAR10_MEAN, std=cifar.CIFAR10_STD, channels_last=True)
CIFAR100 = Settings(ratio=(0.01, 0.5), mean=cifar.CIFAR100_MEAN, std=cifar.CIFAR100_STD, channels_last=True)


@dataclass(frozen=True, kw_only=True)
class ImageNetSettings(Settings):
    """ImageNet's folders may hold other images, of any number of classes."""

    classes: int = 1000


IMAGENET = ImageNetSettings(
    epochs=100,
    batch_size=256,
    milestones=(0.3, 0.6, 0.9),  # epochs 30, 60 and 90
    decay=0.1,
    weight_decay=1e-4,
    ratio=(0.01, 0.8),
    mean=imagenet.MEAN,
    std=imagenet.STD,
    channels_last=True,
    workers=8,
)


def cifar10_vgg15(data: Path | None, settings: Settings = CIFAR10) -> Task:
    """VGG-15 on CIFAR-10."""
    return Task(
        build_model=lambda: models.vgg15(num_classes=10),
        load_data=lambda: cifar.load_cifar10(data, mean=settings.mean, std=settings.std),
    )


def cifar100_resnet34(data: Path | None, settings: Settings = CIFAR100) -> Task:
    """ResNet-34 (64-128-256-512 channels, 3 × 3 stem) on CIFAR-100."""
    return Task(
        build_model=lambda: models.resnet34(num_classes=100),
        load_data=lambda: cifar.load_cifar100(data, mean=settings.mean, std=settings.std),
    )


def imagenet_resnet50(data: Path | None, settings: ImageNetSettings = IMAGENET) -> Task:
    """ResNet-50 on ImageNet: folders `train` and `val`, in each a folder for every class."""
    return Task(
        build_model=lambda: models.resnet50(num_classes=settings.classes),
        load_data=lambda: imagenet.load(data, mean=settings.mean, std=settings.std),
    )
