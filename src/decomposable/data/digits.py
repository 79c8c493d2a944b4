"""Handwritten digits: the 1,797 images of 8 × 8 grey values that come inside scikit-learn, so nothing is downloaded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.data import TensorDataset

from decomposable.data.base import Images, InMemory
from decomposable_edge.errors import InvalidArgumentError, MissingExtraError

IMAGES = 1797
CLASSES = 10


class Digits(NamedTuple):
    """Hold images (1 × 8 × 8, standardised) with their labels, in two parts that share no image."""

    train: TensorDataset
    test: TensorDataset


def load(*, train_images: int = 1000, seed: int = 0) -> Digits:
    """Split the digits at random, every class alike; both parts are standardised by the training images alone.

    >>> digits = load(train_images=300)
    >>> len(digits.train), len(digits.test), digits.train[0][0].shape
    (300, 1497, torch.Size([1, 8, 8]))
    """
    try:  # optional: here, so that importing this module needs no scikit-learn
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingExtraError.of("scikit-learn", "demo") from error

    most = IMAGES - CLASSES
    for option, came, low, high in (("train_images", train_images, CLASSES, most), ("seed", seed, 0, 2**32 - 1)):
        if not low <= came <= high:
            raise InvalidArgumentError.about(option, came, f"an int from {low} to {high}")
    pixels, labels = load_digits(return_X_y=True)
    train, test = train_test_split(range(IMAGES), train_size=train_images, stratify=labels, random_state=seed)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    images = (images - images[train].mean()) / images[train].std()
    targets = torch.tensor(labels)
    return Digits(TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test]))


def load_data(*, train_images: int = 1000, seed: int = 0) -> InMemory:
    """Load the same split as a data set for training. Nothing is augmented: a digit that is flipped is another sign.

    >>> load_data(train_images=300).test_count
    1497
    """
    train, test = (Images(*part.tensors) for part in load(train_images=train_images, seed=seed))
    return InMemory(classes=CLASSES, train=train, test=test)
