"""Handwritten digits: the 1,797 images of 8 × 8 grey values that come inside scikit-learn, so nothing is downloaded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.data import TensorDataset

from decomposable.errors import InvalidArgumentError

IMAGES = 1797
CLASSES = 10


class Digits(NamedTuple):
    """Images (1 × 8 × 8, standardised) with their labels, split into two parts that share no image."""

    train: TensorDataset
    test: TensorDataset


def load(*, train_images: int = 1000, seed: int = 0) -> Digits:
    """Split the digits at random, every class alike, into `train_images` for training and the rest for testing.

    Standardised by the mean and deviation of the training images alone.

    >>> digits = load(train_images=300)
    >>> len(digits.train), len(digits.test), digits.train[0][0].shape
    (300, 1497, torch.Size([1, 8, 8]))
    """
    from sklearn.datasets import load_digits  # optional: here, so that importing this module needs no scikit-learn
    from sklearn.model_selection import train_test_split

    if not CLASSES <= train_images <= IMAGES - CLASSES:
        raise InvalidArgumentError(
            f"train_images={train_images!r}; allowed: an int from {CLASSES} to {IMAGES - CLASSES}"
        )
    pixels, labels = load_digits(return_X_y=True)
    train, test = train_test_split(range(IMAGES), train_size=train_images, stratify=labels, random_state=seed)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    images = (images - images[train].mean()) / images[train].std()
    targets = torch.tensor(labels)
    return Digits(TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test]))
