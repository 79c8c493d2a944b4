"""Recipes whose test set is a part of the training images, so that choices can be made without the real one.

    PYTHONPATH=benchmarks decomposable train held_out:fashion --data DIR --set method=elastic --out RUN

Everything else is as in the recipe of the same name: network, settings, augmentation.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from decomposable import recipes
from decomposable.data.base import Images, InMemory
from decomposable.data.python_text import Text
from decomposable.recipes.settings import Settings
from decomposable.recipes.small import CIFAR10_RESNET20, FASHION_MNIST, cifar10_resnet20
from decomposable.recipes.small import fashion as whole_fashion
from decomposable.recipes.transformers import TEXT, VIT, TextSettings, cifar10_vit, python_text_lm


def fashion(data: Path | None, settings: Settings = FASHION_MNIST) -> recipes.Task:
    """Fashion-MNIST: 50,000 training images to train with, the other 10,000 to judge by."""
    return _judged_by(10_000, whole_fashion(data, settings))


def cifar10(data: Path | None, settings: Settings = CIFAR10_RESNET20) -> recipes.Task:
    """CIFAR-10: 45,000 training images to train with, the other 5,000 to judge by."""
    return _judged_by(5_000, cifar10_resnet20(data, settings))


def _judged_by(count: int, task: recipes.Task) -> recipes.Task:
    return replace(task, load_data=lambda: _split(task.load_data(), count))


def _split(data: object, count: int) -> InMemory:
    """The test images are dropped; the same training images take their place for every seed."""
    assert isinstance(data, InMemory)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(12345))
    held, kept = order[:count], order[count:]
    return replace(data, train=_rows(data.train, kept), test=_rows(data.train, held))


def _rows(images: Images, rows: torch.Tensor) -> Images:
    return Images(images.pixels[rows], images.labels[rows])


def vit(data: Path | None, settings: Settings = VIT) -> recipes.Task:
    """The vision transformer: 45,000 training images of CIFAR-10 to train with, the other 5,000 to judge by."""
    return _judged_by(5_000, cifar10_vit(data, settings))


def text(settings: TextSettings = TEXT) -> recipes.Task:
    """The language model: nine tenths of the training text to train with, its last tenth to judge by."""
    task = python_text_lm(settings)
    return replace(task, load_data=lambda: _without_its_end(task.load_data()))


def _without_its_end(data: object) -> Text:
    """The test text is dropped; the end of the training text takes its place."""
    assert isinstance(data, Text)
    border = len(data.train) * 9 // 10
    return replace(data, train=data.train[:border], test=data.train[border:])
