"""A module as a function of its inputs by name, which gives back plain containers: what an exporter traces."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.export.interface import Interface

PREFIX = "module."
"""What stands before the names of a module's weights in one that is `Named`."""


class Named(nn.Module):
    """The module, called with the inputs that a file has: by name, or by place where it is the first entry of a batch.

    An input that is left out is zeros, of the size that the others say. Axes of one name are of one length.
    """

    def __init__(self, module: nn.Module, interface: Interface) -> None:
        super().__init__()
        self.module = module
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if interface.call.is_default else inspect.Parameter.KEYWORD_ONLY
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in interface.names])

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = dict(signature.bind(*args, **kwargs).arguments)
            _check_lengths(inputs, interface)
            return plain(interface.call.run(module, inputs | _left_out(inputs, interface)))

        forward.__signature__ = signature  # type: ignore[attr-defined]  # the exporter asks for the names
        self.forward = forward


def _check_lengths(inputs: Mapping[str, Tensor], interface: Interface) -> None:
    for axis, [(first, where), *others] in interface.places().items():
        for name, at in others if axis in interface.lengths else ():
            torch._check(inputs[name].shape[at] == inputs[first].shape[where])


def _left_out(inputs: Mapping[str, Tensor], interface: Interface) -> dict[str, Tensor]:
    places, found = interface.places(), {}
    batch = next(iter(inputs.values())).shape[0]
    for name in interface.left_out:
        spec, axes = interface.call.inputs[name], interface.axes.get(name, {})
        shape: list[Any] = [batch, *spec.shape]
        for at, axis in axes.items():
            if axis in places:
                other, where = places[axis][0]
                shape[at] = inputs[other].shape[where]
        found[name] = torch.zeros(shape, dtype=getattr(torch, spec.dtype))
    return found


def plain(value: Any) -> Any:
    """What a model returns as dicts, lists and tuples: other containers are dicts of their fields.

    A file that holds them can be read where the model's package is not installed.
    """
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {key: plain(part) for key, part in zip(value._fields, value, strict=True)}
    if isinstance(value, list | tuple):
        return type(value)(plain(part) for part in value) if type(value) in (list, tuple) else tuple(map(plain, value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def is_plain(value: Any) -> bool:
    """Whether `plain` leaves it as it is."""
    if isinstance(value, Mapping):
        return type(value) in (dict, OrderedDict) and all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(is_plain, value))
    return not is_dataclass(value)
