"""The networks of the paper's experiments, and small ones, all in plain ``torch.nn``.

>>> from decomposable import models
>>> model = models.resnet20(num_classes=10)
>>> sorted(models.MODELS)
['resnet20', 'resnet34', 'resnet50', 'resnet56', 'vgg15']
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import torch
from torch import nn

from decomposable.models.origin import built_by, is_patched
from decomposable.models.resnet import resnet20, resnet34, resnet50, resnet56
from decomposable.models.transformer import small_lm, small_vit
from decomposable.models.vgg import small_cnn, vgg15
from decomposable_edge.errors import InvalidArgumentError

__all__ = [
    "MODELS",
    "build",
    "resnet20",
    "resnet34",
    "resnet50",
    "resnet56",
    "small_cnn",
    "small_lm",
    "small_vit",
    "vgg15",
]

MODELS: dict[str, Callable[..., nn.Module]] = {
    builder.__name__: builder for builder in (vgg15, resnet20, resnet34, resnet50, resnet56)
}
BUILDERS = {**MODELS, "small_cnn": small_cnn, "small_vit": small_vit, "small_lm": small_lm}
"""What a file may name. Nothing else is ever called because a file says so."""

_MOST = {
    **{"num_classes": 1 << 20, "in_channels": 1 << 12, "widths": 1 << 14},
    **{"width": 1 << 14, "depth": 1 << 8, "heads": 1 << 8, "patch": 1 << 10, "image": 1 << 12, "context": 1 << 17},
}
_MOST_WIDTHS = 64


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


def rebuilt(note: Mapping[str, Any]) -> nn.Module:
    """The model that a note describes, on the meta device: it takes no memory, whatever the note claims.

    >>> rebuilt({"name": "small_cnn", "arguments": {"widths": [8, 16]}})[0].weight.shape
    torch.Size([8, 1, 3, 3])
    """
    name, arguments = note["name"], note["arguments"]
    if name not in BUILDERS:
        raise InvalidArgumentError(f"it was built by {name!r:.60}; allowed: {', '.join(BUILDERS)}")
    parameters = inspect.signature(BUILDERS[name]).parameters
    for option, value in arguments.items():
        if option not in parameters:
            raise InvalidArgumentError(f"{name} has no argument {option!r:.60}; allowed: {', '.join(parameters)}")
        if not _is_sane(option, value):
            kind = "a list of ints" if option == "widths" else "an int"
            raise InvalidArgumentError(f"{name}: {option}={value!r:.60}; allowed: {kind} from 1 to {_MOST[option]:,}")
    with torch.device("meta"):
        return BUILDERS[name](**arguments)


def noted(model: nn.Module) -> dict[str, Any] | None:
    """The note on a model for a file, with ``is_changed`` where the model is not any more what its builder made.

    >>> model = small_cnn()
    >>> model[2] = nn.Tanh()
    >>> noted(small_cnn())["is_changed"], noted(model)["is_changed"], noted(nn.Tanh())
    (False, True, None)
    """
    note = built_by(model)
    if note is None:
        return None
    try:
        built = rebuilt(note)
    except InvalidArgumentError:  # larger than what is taken from a file
        return None
    return {**note, "is_changed": not _is_alike(built, model)}


def _is_alike(built: nn.Module, model: nn.Module) -> bool:
    """Whether a model computes what its builder made it to, as far as its modules tell; weights do not count."""
    pairs = zip(built.named_modules(), model.named_modules(), strict=False)  # as many as the other has: repr shows them
    is_alike = repr(built) == repr(model)  # an activation that was replaced is not in the state dict
    return is_alike and all(name == other and _does_the_same(one, each) for (name, one), (other, each) in pairs)


def _does_the_same(built: nn.Module, module: nn.Module) -> bool:
    """Whether a module is of the very same class, and nothing about it is changed that its repr does not show."""
    if type(built) is not type(module) or is_patched(module):
        return False
    before, now = ({k: v for k, v in vars(m).items() if isinstance(v, Number | str)} for m in (built, module))
    return all(now.get(name) == value for name, value in before.items() if name != "training")


def _is_sane(option: str, value: object) -> bool:
    if option != "widths":
        return type(value) is int and 1 <= value <= _MOST[option]
    is_list = isinstance(value, list) and 1 <= len(value) <= _MOST_WIDTHS
    return is_list and all(type(each) is int and 1 <= each <= _MOST[option] for each in value)  # type: ignore[attr-defined]
