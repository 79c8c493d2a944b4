"""The networks of the paper's experiments, and two small ones, all in plain ``torch.nn``.

>>> from decomposable import models
>>> model = models.resnet20(num_classes=10)
>>> sorted(models.MODELS)
['resnet20', 'resnet34', 'resnet50', 'resnet56', 'vgg15']
"""

import difflib
from collections.abc import Callable
from typing import Any

from torch import nn

from decomposable.models.resnet import resnet20, resnet34, resnet50, resnet56
from decomposable.models.small import small_cnn
from decomposable.models.vgg import vgg15

__all__ = ["MODELS", "build", "resnet20", "resnet34", "resnet50", "resnet56", "small_cnn", "vgg15"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "vgg15": vgg15,
    "resnet20": resnet20,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet56": resnet56,
}


def build(name: str, **kwargs: Any) -> nn.Module:
    """Build a model by name; keyword arguments go to its builder.

    >>> build("resnet20", num_classes=7).linear.out_features
    7
    >>> build("resnet-20")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: unknown model 'resnet-20'; did you mean 'resnet20'? Known: ...
    """
    if name not in MODELS:
        near = difflib.get_close_matches(name.lower(), MODELS, n=1)
        hint = f"; did you mean {near[0]!r}? Known: " if near else "; known: "
        raise ValueError(f"unknown model {name!r}{hint}{', '.join(sorted(MODELS))}")
    return MODELS[name](**kwargs)
