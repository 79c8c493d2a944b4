"""A restricted unpickler: dicts of arrays, strings, ints and lists, as the python layout of CIFAR has them.

The four names that numpy's arrays are pickled with (`_reconstruct`, `ndarray`, `dtype`, `_codecs.encode`) are tokens to
the machine of `pickling.py`, and what they would do is written out below, with every size checked: an array takes
exactly the bytes that are there for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decomposable.data import folders
from decomposable.data.pickling import Machine, Refused, Token, in_brief, kind_of, shown
from decomposable_edge.errors import DataError

_KINDS = frozenset(kind + size for kind in "iu" for size in "1248")
_BYTE_ORDERS = frozenset("<>=|")
_MOST_DIMENSIONS = 4


def load_plain(file: Path, *, limit: int) -> dict[str, Any]:
    """The dict in a pickle of at most `limit` bytes. Values are text, bytes, numbers, None, lists, tuples, arrays."""
    content = folders.read_bytes(file, limit)
    try:
        value, end = _Arrays(len(content)).run(content)
        if end != len(content):
            raise Refused("bytes after the end of the pickle")
        return _finished(value)
    except Refused as refused:
        raise DataError(f"{file}: {refused}; allowed: a pickled dict of arrays, strings, ints and lists") from None
    except (ValueError, IndexError, KeyError) as error:  # what pickletools and an empty stack raise
        raise DataError(f"{file}: not a whole pickle ({in_brief(error)})") from error


@dataclass(slots=True, eq=False)
class _DType:
    """A data type in the making: what comes from REDUCE, and gets its byte order from BUILD."""

    code: str
    order: str = "="


@dataclass(slots=True, eq=False)
class _Array:
    """An array in the making: empty as it comes from REDUCE, filled by BUILD."""

    array: np.ndarray | None = None


class _Arrays(Machine):
    """Knows numpy's arrays of whole numbers."""

    admitted = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),  # numpy 2
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),  # bytes, where Python 3 wrote protocol 2
        }
    )

    def reduce(self, token: Token, arguments: Any) -> Any:
        """An array or a type that BUILD finishes, or bytes."""
        match token.name, arguments:
            case "_reconstruct", (Token(name="ndarray"), (0,), "b" | b"b"):
                return _Array()
            case "dtype", (str(code), 0 | 1, 0 | 1) if code in _KINDS:
                return _DType(code)
            case "encode", (str(text), "latin1" | "latin-1"):
                return self.encode(text)
        return super().reduce(token, arguments)

    def build(self, target: Any, state: Any) -> None:
        """The order of a type's bytes, or the content of an array."""
        match target, state:
            case _DType(), (3, str(order), None, None, None, -1, -1, 0) if order in _BYTE_ORDERS:
                target.order = order
            case _Array(array=None), (1, tuple(shape), _DType() as dtype, bool(is_fortran), str() | bytes() as content):
                raw = self.encode(content) if isinstance(content, str) else content  # Python 2's strings are bytes
                target.array = _make_array(shape, np.dtype(dtype.order + dtype.code), is_fortran, raw)
            case _:
                super().build(target, state)


def _finished(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"the pickle holds {kind_of(value)}")
    for key, item in value.items():
        if isinstance(item, _Array) and item.array is None:
            raise Refused(f"the array {key[:50]!r} has no content")
        if isinstance(item, Token | _DType):
            raise Refused(f"the entry {key[:50]!r} is {kind_of(item)}")
    return {key: item.array if isinstance(item, _Array) else item for key, item in value.items()}


def _make_array(shape: tuple[Any, ...], dtype: np.dtype, is_fortran: bool, raw: bytes) -> np.ndarray:
    if len(shape) > _MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise Refused(f"an array of shape {shown(shape)}")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise Refused(f"an array of shape {shown(shape)} and type {dtype} with {len(raw):,} bytes")
    return np.frombuffer(raw, dtype=dtype).reshape(shape, order="F" if is_fortran else "C")
