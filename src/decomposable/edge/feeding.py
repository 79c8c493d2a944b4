"""What a request brings, checked against what the network takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from decomposable.edge.arrays import Array
from decomposable.edge.bundle import Port
from decomposable.errors import InvalidArgumentError


def feeds_of(ports: Sequence[Port], x: Array | Mapping[str, Array]) -> dict[str, Array]:
    """The inputs by name: of one array where there is one input, or of a dict."""
    if isinstance(x, Mapping):
        feeds = dict(x)
    elif len(ports) == 1:
        feeds = {ports[0].name: x}
    else:
        raise InvalidArgumentError(f"run: got one array; allowed: a dict of {', '.join(p.name for p in ports)}")
    if feeds.keys() != {port.name for port in ports}:
        came, wanted = ", ".join(map(str, feeds)), ", ".join(port.name for port in ports)
        raise InvalidArgumentError(f"run: got the inputs {came or 'none'}; allowed: {wanted}")
    checked = {port.name: _checked(port, feeds[port.name]) for port in ports}
    _check_lengths(ports, checked)
    return checked


def _check_lengths(ports: Sequence[Port], feeds: Mapping[str, Array]) -> None:
    """Axes of one name are of one length, the batch among them."""
    seen: dict[str, tuple[int, str]] = {}
    for port in ports:
        for axis, size in zip(port.shape, feeds[port.name].shape, strict=True):
            if isinstance(axis, str) and axis != "?":
                length, where = seen.setdefault(axis, (size, port.name))
                if length != size:
                    raise InvalidArgumentError(
                        f"run: '{axis}' is {length} in '{where}' and {size} in '{port.name}'; allowed: one length"
                    )


def _checked(port: Port, value: object) -> Array:
    """The array, as this machine lays out numbers; one that the network cannot take is refused in one line.

    Numpy calls a type by the same name in either order of bytes; ONNX Runtime takes all for the machine's own.
    """
    if not isinstance(value, np.ndarray):
        raise InvalidArgumentError(f"run: '{port.name}' is a {type(value).__name__}; allowed: a numpy array")
    fits = len(port.shape) == value.ndim and all(
        not isinstance(wanted, int) or wanted == size for wanted, size in zip(port.shape, value.shape, strict=True)
    )
    if not fits or value.dtype.name != port.dtype:
        wanted = " × ".join(map(str, port.shape))
        raise InvalidArgumentError(
            f"run: '{port.name}' has shape {value.shape} and type {value.dtype}; allowed: {wanted}, {port.dtype}"
        )
    return value.astype(port.dtype, copy=False)
