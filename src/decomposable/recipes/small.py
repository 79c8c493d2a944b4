"""Set-ups that fit a laptop: minutes to hours on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from decomposable import models
from decomposable.data import cifar, fashion_mnist
from decomposable.data import digits as digits_data
from decomposable.recipes import Task
from decomposable.recipes.settings import Settings


@dataclass(frozen=True, kw_only=True)
class DigitsSettings(Settings):
    """The digits can be split as one likes."""

    train_images: int = 1000  # of 1,797; the others are the test


DIGITS = DigitsSettings(
    epochs=20,
    batch_size=50,
    fine_tune_learning_rate=0.02,
    schedule="cosine",
    warmup_epochs=2.0,
    channels_last=True,
)
FASHION_MNIST = Settings(
    epochs=8,
    fine_tune_learning_rate=0.02,
    schedule="cosine",
    warmup_epochs=0.5,
    mean=fashion_mnist.MEAN,
    std=fashion_mnist.STD,
    channels_last=True,
)
CIFAR10_RESNET20 = Settings(
    epochs=40,
    fine_tune_learning_rate=0.1,  # as high: of three tried for one epoch, the best one for the small sizes
    schedule="cosine",
    warmup_epochs=0.5,
    # Those that the pretrained weights in circulation were trained with, so that `--init` takes them as they are.
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    channels_last=True,
)


def digits(settings: DigitsSettings = DIGITS) -> Task:
    """A small CNN on scikit-learn's handwritten digits, 8 × 8 grey values; half a minute, and no data to get."""
    return Task(
        build_model=lambda: models.small_cnn(num_classes=digits_data.CLASSES),
        load_data=lambda: digits_data.load_data(train_images=settings.train_images),
    )


def fashion(data: Path | None, settings: Settings = FASHION_MNIST) -> Task:
    """A small CNN on Fashion-MNIST, 28 × 28 grey values."""
    return Task(
        build_model=lambda: models.small_cnn((16, 32, 32, 64, 64)),
        load_data=lambda: fashion_mnist.load(data, mean=settings.mean, std=settings.std),
    )


def fashion_connected(data: Path | None, settings: Settings = FASHION_MNIST) -> Task:
    """A fully connected network without normalisation on Fashion-MNIST: what proposition 2 of the paper speaks of."""
    return Task(
        build_model=lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
        ),
        load_data=lambda: fashion_mnist.load(data, mean=settings.mean, std=settings.std),
    )


def cifar10_resnet20(data: Path | None, settings: Settings = CIFAR10_RESNET20) -> Task:
    """ResNet-20 on CIFAR-10."""
    return Task(
        build_model=lambda: models.resnet20(num_classes=10),
        load_data=lambda: cifar.load_cifar10(data, mean=settings.mean, std=settings.std),
    )


def cifar10_resnet56(data: Path | None, settings: Settings = CIFAR10_RESNET20) -> Task:
    """ResNet-56 on CIFAR-10: three times as deep."""
    return replace(cifar10_resnet20(data, settings), build_model=lambda: models.resnet56(num_classes=10))
