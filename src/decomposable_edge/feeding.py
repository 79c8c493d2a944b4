"""What goes into a network: what a request brings, checked, and inputs to measure with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from decomposable_edge.checks import check_count
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.file.container import Array
from decomposable_edge.network import Port
from decomposable_edge.text import one_line


def feeds_of(ports: Sequence[Port], x: Array | Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs by name: of one array where there is one input, or of a dict."""
    wanted = ", ".join(port.name for port in ports)
    if not isinstance(x, Mapping):
        if len(ports) > 1:
            raise InvalidArgumentError(f"run: got one array; allowed: a dict of {wanted}")
        x = {ports[0].name: x}
    if x.keys() != {port.name for port in ports}:
        raise InvalidArgumentError(f"run: got the inputs {', '.join(map(str, x)) or 'none'}; allowed: {wanted}")
    lengths: dict[str, tuple[int, str]] = {}
    return {port.name: _checked(port, x[port.name], lengths) for port in ports}


def _checked(port: Port, value: object, lengths: dict[str, tuple[int, str]]) -> Array:
    """Return the array, as this machine lays out numbers; one that the network cannot take is refused in one line.

    `lengths` are those of the axes that vary so far, and where: axes of one name are of one length. Numpy calls a type
    by the same name in either order of bytes; ONNX Runtime takes all for the machine's own.
    """
    if not isinstance(value, np.ndarray):
        raise InvalidArgumentError(f"run: '{port.name}' is a {type(value).__name__}; allowed: a numpy array")
    pairs = list(zip(port.shape, value.shape, strict=False))
    fits = len(port.shape) == value.ndim and all(isinstance(axis, str) or axis == size for axis, size in pairs)
    if not fits or value.dtype.name != port.dtype:
        wanted = " × ".join(map(str, port.shape))
        raise InvalidArgumentError(
            f"run: '{port.name}' has shape {value.shape} and type {value.dtype}; allowed: {wanted}, {port.dtype}"
        )
    for axis, size in pairs:
        if isinstance(axis, str) and axis != "?":
            length, where = lengths.setdefault(axis, (size, port.name))
            if length != size:
                raise InvalidArgumentError(
                    f"run: '{axis}' is {length} in '{where}' and {size} in '{port.name}'; allowed: one length"
                )
    return value.astype(port.dtype, copy=False)


def example(ports: Sequence[Port], batch: int, lengths: Mapping[str, int] | None = None) -> dict[str, Array]:
    """Return inputs of so many samples, always the same: normal numbers, or whole ones that the network may be given.

    `lengths` says how long the axes are that vary besides the batch.

    >>> example([Port(name="x", shape=("batch", 3, 8, 8), dtype="float32")], 2)["x"].shape
    (2, 3, 8, 8)
    """
    check_count("batch", batch)
    random, feeds = np.random.default_rng(0), {}
    for port in ports:
        named = [batch, *port.shape[1:]] if port.shape and not isinstance(port.shape[0], int) else list(port.shape)
        shape = [size if isinstance(size, int) else (lengths or {}).get(size, -1) for size in named]
        if -1 in shape:
            raise InvalidArgumentError(
                f"measure: '{port.name}' has the shape {port.shape}; allowed: a batch that varies, and axes of which "
                "the file says a length"
            )
        is_whole, (least, most) = np.dtype(port.dtype).kind != "f", port.values
        with refusing(f"batch={batch!r:.40}: there is no such batch here"):
            values = random.integers(least, most + 1, shape) if is_whole else random.standard_normal(shape)
            feeds[port.name] = values.astype(port.dtype)
    return feeds


@contextmanager
def refusing(text: str) -> Iterator[None]:
    """Say in one line what does not fit into memory: numpy and ONNX Runtime have many errors for it."""
    try:
        yield
    except Exception as error:
        raise InvalidArgumentError(f"{text} ({type(error).__name__}: {in_one_line(error)})") from error


def in_one_line(error: Exception) -> str:
    """Return what an error of numpy or ONNX Runtime says, which may have many lines."""
    return one_line(" ".join(str(error).split()), 200)
