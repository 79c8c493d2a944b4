"""Small transformers that fit a laptop: one on images, and one on text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from decomposable import models
from decomposable.data import cifar, python_text
from decomposable.data.base import Batch
from decomposable.recipes import Task
from decomposable.recipes.settings import Settings
from decomposable.recipes.values import Check


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """The text is cut into windows."""

    context: int = 128  # bytes
    windows: int = 64_000  # to train with, of those that there are: eight million bytes
    test_windows: int = 1500

    checks: ClassVar[tuple[Check, ...]] = (
        *Settings.checks,
        (("context", "windows", "test_windows"), "an int of at least 1", lambda v: v >= 1),
    )


VIT = Settings(
    epochs=5,
    batch_size=128,
    optimizer="adamw",
    learning_rate=1e-3,
    fine_tune_learning_rate=2e-4,
    schedule="cosine",
    warmup_epochs=0.5,
    weight_decay=0.05,
    clip_norm=1.0,
    mean=cifar.CIFAR10_MEAN,
    std=cifar.CIFAR10_STD,
)
TEXT = TextSettings(
    epochs=1,
    batch_size=32,
    optimizer="adamw",
    learning_rate=1e-3,
    fine_tune_learning_rate=2e-4,
    schedule="cosine",
    warmup_epochs=0.05,
    weight_decay=0.1,
    clip_norm=1.0,
)


def cifar10_vit(data: Path | None, settings: Settings = VIT) -> Task:
    """A vision transformer of four blocks on CIFAR-10, from scratch."""
    return Task(
        build_model=lambda: models.small_vit(num_classes=10),
        load_data=lambda: cifar.load_cifar10(data, mean=settings.mean, std=settings.std),
    )


def python_text_lm(settings: TextSettings = TEXT) -> Task:
    """A causal language model of four blocks on the bytes of Python's own library; no data to get."""
    return Task(
        build_model=lambda: models.small_lm(context=settings.context),
        load_data=lambda: python_text.load(
            context=settings.context, most=settings.windows, most_test=settings.test_windows
        ),
        loss=next_token,
    )


def next_token(net: nn.Module, batch: Batch) -> Tensor:
    """The cross-entropy of the token that follows each, in nats."""
    tokens, following = batch
    return F.cross_entropy(net(tokens), following.flatten())
