"""What goes into a network: what a request brings, checked, and inputs to measure with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from decomposable_edge.checks import check_count
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.network import Port
from decomposable_edge.onnx_model import Array


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


def example(ports: Sequence[Port], batch: int, lengths: Mapping[str, int] | None = None) -> dict[str, Array]:
    """Inputs of so many samples, the same ones every time: normal numbers, or such as they may be where they are whole.

    `lengths` says how long the axes are that vary besides the batch.

    >>> example([Port(name="x", shape=("batch", 3, 8, 8), dtype="float32")], 2)["x"].shape
    (2, 3, 8, 8)
    """
    check_count("batch", batch)
    random = np.random.default_rng(0)
    feeds = {}
    for port in ports:
        named = [batch, *port.shape[1:]] if port.shape and not isinstance(port.shape[0], int) else list(port.shape)
        shape = [size if isinstance(size, int) else (lengths or {}).get(size, -1) for size in named]
        if -1 in shape:
            raise InvalidArgumentError(
                f"measure: '{port.name}' has the shape {port.shape}; allowed: a batch that varies, and axes of which "
                "the file says a length"
            )
        is_whole = np.dtype(port.dtype).kind != "f"
        least, most = port.values
        with refusing(f"batch={batch!r:.40}: there is no such batch here"):
            values = random.integers(least, most + 1, shape) if is_whole else random.standard_normal(shape)
            feeds[port.name] = values.astype(port.dtype)
    return feeds


@contextmanager
def refusing(text: str) -> Iterator[None]:
    """What does not fit into memory, in one line: numpy and ONNX Runtime have many errors for it."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InvalidArgumentError(f"{text} ({type(error).__name__}: {reason})") from error
