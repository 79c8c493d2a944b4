"""The networks of the paper's experiments, and small ones, all in plain ``torch.nn``.

>>> from decomposable import models
>>> model = models.resnet20(num_classes=10)
>>> sorted(models.MODELS)
['resnet20', 'resnet34', 'resnet50', 'resnet56', 'vgg15']
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from decomposable.models.resnet import resnet20, resnet34, resnet50, resnet56
from decomposable.models.transformer import small_lm, small_vit
from decomposable.models.vgg import small_cnn, vgg15
from decomposable_edge.errors import InvalidArgumentError

MODELS: dict[str, Callable[..., nn.Module]] = {
    each.__name__: each for each in (vgg15, resnet20, resnet34, resnet50, resnet56)
}
__all__ = ["MODELS", "build", "small_cnn", "small_lm", "small_vit"]
__all__ += ["resnet20", "resnet34", "resnet50", "resnet56", "vgg15"]


def build(name: str, **kwargs: Any) -> nn.Module:
    """Build a model by name; keyword arguments go to its builder.

    >>> build("resnet20", num_classes=7).linear.out_features
    7
    """
    if name not in MODELS:
        raise InvalidArgumentError.about("model", name, ", ".join(sorted(MODELS)))
    return MODELS[name](**kwargs)
