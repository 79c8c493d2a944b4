"""What an exported file takes, and gives: inputs by name, which of their axes vary, and plain containers.

`Named` is a module as such a function, which is what an exporter traces.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.network.calls import CallSignature
from decomposable_edge.checks import is_integer
from decomposable_edge.errors import InvalidArgumentError

BATCH = "batch"
"""What the first axis of every input is called."""

Feeds = Mapping[str, Tensor]
"""A batch, as the inputs by name."""

Axes = Mapping[str, Mapping[int, str]]
"""The names of axes that vary besides the batch, by input and place."""

PREFIX = "module."
"""What stands before the names of a module's weights in one that is `Named`."""

MOST_BATCH, MOST_NUMBERS = 1 << 16, 1 << 27


@dataclass(frozen=True, kw_only=True)
class Interface:
    """What a file takes."""

    call: CallSignature  # how the network is called
    axes: Axes = field(default_factory=dict)
    batch: int | None = None  # the one size of the batch, where it does not vary
    left_out: tuple[str, ...] = ()  # inputs that do not change what the network gives; the file has not got them

    @property
    def names(self) -> tuple[str, ...]:
        """Return the inputs of the file, in order."""
        return tuple(name for name in self.call.inputs if name not in self.left_out)

    @property
    def lengths(self) -> dict[str, int]:
        """Return how long the axes that vary are in the example input, by their names."""
        shapes = {name: spec.shape for name, spec in self.call.inputs.items()}
        return {axis: shapes[name][at - 1] for name, axes in self.axes.items() for at, axis in axes.items()}

    def rows(self, known: Feeds | None, count: int) -> dict[str, Tensor]:
        """Return so many of the known rows, which begin anew where they are fewer; made-up ones without any."""
        return self.call.example(count) if known is None else resized(known, {}, count, {})

    def places(self) -> dict[str, list[tuple[str, int]]]:
        """Return where each name of an axis is: the inputs of the file, and the place in their shapes."""
        found: dict[str, list[tuple[str, int]]] = {BATCH: [(name, 0) for name in self.names]}
        for name in self.names:
            for at, axis in self.axes.get(name, {}).items():
                found.setdefault(axis, []).append((name, at))
        return found


def interface_of(call: CallSignature, dynamic: object, batch: int | None) -> Interface:
    """Return what a file takes, after checking what was asked for."""
    interface = Interface(call=call, axes=check_dynamic(dynamic, call), batch=batch)
    if batch is not None:
        numbers = sum(math.prod(spec.shape) for spec in call.inputs.values())
        most = min(MOST_BATCH, max(1, MOST_NUMBERS // max(1, numbers)))
        if batch > most:
            raise InvalidArgumentError(
                f"batch={batch}; allowed: 1 to {most:,} for samples of {numbers:,} numbers ({MOST_NUMBERS:,} in all)"
            )
    return interface


def check_batch(batch: int | None) -> int | None:
    """Return a number of samples, or None."""
    if batch is not None and (not is_integer(batch) or not 1 <= batch <= MOST_BATCH):
        raise InvalidArgumentError(
            f"batch={batch!r:.40}; allowed: an int of at least 1 and at most {MOST_BATCH:,}, or None for any"
        )
    return None if batch is None else int(batch)


def check_dynamic(dynamic: object, call: CallSignature) -> dict[str, dict[int, str]]:
    """Return the axes that vary, as they were asked for: ``{"input_ids": {1: "length"}}``."""
    if dynamic is None:
        return {}
    if not isinstance(dynamic, Mapping):
        raise _wrong(f"dynamic={dynamic!r:.60}")
    found: dict[str, dict[int, str]] = {}
    for name, axes in dynamic.items():
        if name not in call.inputs:
            raise InvalidArgumentError(f"dynamic: there is no input {name!r:.60}; allowed: {', '.join(call.inputs)}")
        if not isinstance(axes, Mapping):
            raise _wrong(f"dynamic[{name!r}]={axes!r:.60}")
        for at, axis in axes.items():
            _check_axis(name, at, axis, len(call.inputs[name].shape))
        if axes:
            found[name] = {int(at): str(axis) for at, axis in axes.items()}
    _check_lengths(call, found)
    return found


def _wrong(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f'{what}; allowed: names of axes by input, such as {{"input_ids": {{1: "length"}}}}')


def _check_axis(name: str, at: Any, axis: Any, count: int) -> None:
    if not is_integer(at) or not 1 <= at <= count:
        allowed = f"1 to {count} (0 is the batch, which varies)" if count else "none (it has no axis but the batch)"
        raise InvalidArgumentError(f"dynamic: '{name}' has no axis {at!r:.40} that can vary; allowed: {allowed}")
    if not isinstance(axis, str) or not axis.isidentifier() or axis == BATCH:
        raise InvalidArgumentError(
            f"dynamic: axis {at} of '{name}' is called {axis!r:.40}; allowed: a name such as length, and not {BATCH}"
        )


def _check_lengths(call: CallSignature, axes: Axes) -> None:
    """Refuse one name for axes that are not of one length in the example input."""
    lengths: dict[str, tuple[int, str]] = {}
    for name, places in axes.items():
        for at, axis in places.items():
            size = call.inputs[name].shape[at - 1]
            other, where = lengths.setdefault(axis, (size, name))
            if other != size:
                raise InvalidArgumentError(
                    f"dynamic: '{axis}' is {other} long in '{where}' and {size} in '{name}'; allowed: one name for "
                    "axes of one length"
                )


def resized(feeds: Feeds, axes: Axes, count: int, lengths: Mapping[str, int]) -> dict[str, Tensor]:
    """Return so many of the rows, with axes of these lengths; what is shorter begins anew.

    >>> resized({"x": torch.arange(6).reshape(2, 3)}, {"x": {1: "length"}}, 3, {"length": 2})["x"].tolist()
    [[0, 1], [3, 4], [0, 1]]
    """
    found = {}
    for name, tensor in feeds.items():
        found[name] = tensor[torch.arange(count) % len(tensor)]
        for at, axis in axes.get(name, {}).items():
            if axis in lengths:
                places = torch.arange(lengths[axis]) % tensor.shape[at]
                found[name] = found[name].index_select(at, places)
    return found


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
            _check_equal(inputs, interface)
            return plain(interface.call.run(module, inputs | _left_out(inputs, interface)))

        forward.__signature__ = signature  # type: ignore[attr-defined]  # the exporter asks for the names
        self.forward = forward


def _check_equal(inputs: Mapping[str, Tensor], interface: Interface) -> None:
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
    """Return what a model gives as dicts, lists and tuples, so that no file needs the model's package to be read.

    A decoder's cache of keys and values is left out: a file runs whole sequences.
    """
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items() if not _is_cache(part)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {key: plain(part) for key, part in zip(value._fields, value, strict=True)}
    if isinstance(value, list | tuple):
        return type(value)(plain(part) for part in value) if type(value) in (list, tuple) else tuple(map(plain, value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def _is_cache(value: object) -> bool:
    return type(value).__module__ == "transformers.cache_utils"


def is_plain(value: Any) -> bool:
    """Return whether `plain` leaves it as it is."""
    if isinstance(value, Mapping):
        return type(value) in (dict, OrderedDict) and all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(is_plain, value))
    return not is_dataclass(value)
