"""A restricted unpickler: dicts of arrays, strings, ints and lists, as the python layout of CIFAR has them.

A pickle is a program for a stack machine, and `pickle.load` lets it call whatever can be imported. The machine here
calls nothing at all. It knows the instructions that plain data needs; the four names that numpy's arrays are pickled
with (`_reconstruct`, `ndarray`, `dtype`, `_codecs.encode`) are tokens to it, and what they would do is written out
below, with every size checked. Any other instruction or name ends the reading, and is named.

So that a small file cannot fill the memory: instructions are counted, an array takes exactly the bytes that are there
for it, strings are encoded only up to the size of the file, and memory cells are a dict (where `pickle` has a list,
which one instruction can make gigabytes long). A key is a string, since hashing nested tuples can take forever.
"""

from __future__ import annotations

import math
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from decomposable.data import folders
from decomposable.errors import DataError

MOST_INSTRUCTIONS = 1_000_000
"""CIFAR-100's training file has about 250,000."""

_ADMITTED = frozenset(
    {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),  # numpy 2
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),  # bytes, where Python 3 wrote protocol 2
    }
)
_CONSTANTS = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "BINSTRING", "SHORT_BINSTRING"}  # Python 2's, then Python 3's
    | {"BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"}
)
_KINDS = frozenset(kind + size for kind in "iu" for size in "1248")
_BYTE_ORDERS = frozenset("<>=|")
_MOST_DIMENSIONS = 4


def load_plain(file: Path, *, limit: int) -> dict[str, Any]:
    """The dict in a pickle of at most `limit` bytes. Values are str, bytes, int, bool, None, list, tuple, array."""
    content = folders.read_bytes(file, limit)
    try:
        return _Machine(len(content)).run(content)
    except _Refused as refused:
        raise DataError(f"{file}: {refused}; allowed: a pickled dict of arrays, strings, ints and lists") from None
    except (ValueError, IndexError, KeyError) as error:  # what pickletools and an empty stack raise
        raise DataError(f"{file}: not a whole pickle ({_in_brief(error)})") from error


def _in_brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:100]}"


class _Refused(Exception):
    """Something that plain data does not need."""


class _Token:
    """An admitted name. Not callable; nothing can be set on it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _DType:
    """A data type in the making: what comes from REDUCE, and gets its byte order from BUILD."""

    __slots__ = ("code", "order")

    def __init__(self, code: str) -> None:
        self.code, self.order = code, "="


class _Array:
    """An array in the making: empty as it comes from REDUCE, filled by BUILD."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: np.ndarray | None = None


_MARK = object()


class _Machine:
    """Runs one pickle."""

    def __init__(self, size: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.bytes_left = size  # to encode strings into

    def run(self, content: bytes) -> dict[str, Any]:
        for count, (opcode, argument, position) in enumerate(pickletools.genops(content)):
            if count == MOST_INSTRUCTIONS:
                raise _Refused(f"more than {MOST_INSTRUCTIONS:,} instructions")
            if opcode.name == "STOP":
                if position != len(content) - 1:
                    raise _Refused("bytes after the end of the pickle")
                return self.result()
            self.step(opcode.name, argument)
        raise ValueError("no STOP")  # pickletools says so itself

    def result(self) -> dict[str, Any]:
        (value,) = self.stack
        if not isinstance(value, dict):
            raise _Refused(f"the pickle holds {_kind(value)}")
        if unfinished := [key for key, item in value.items() if isinstance(item, _Array) and item.array is None]:
            raise _Refused(f"the array {unfinished[0][:50]!r} has no content")
        if foreign := [key for key, item in value.items() if isinstance(item, (_Token, _DType))]:
            raise _Refused(f"the entry {foreign[0][:50]!r} is {_kind(value[foreign[0]])}")
        return {key: item.array if isinstance(item, _Array) else item for key, item in value.items()}

    def step(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case _ if opcode in _CONSTANTS:
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode])
            case "MARK":
                stack.append(_MARK)
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(reversed([self.pop() for _ in range(int(opcode[-1]))])))
            case "TUPLE":
                stack.append(tuple(self.pop_to_mark()))
            case "APPEND":
                item = self.pop()
                self.top(list).append(item)
            case "APPENDS":
                items = self.pop_to_mark()
                self.top(list).extend(items)
            case "SETITEM":
                item, key = self.pop(), self.pop()
                self.set_items([key, item])
            case "SETITEMS":
                self.set_items(self.pop_to_mark())
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.top(object)
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.top(object)
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(self.find(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = self.pop(), self.pop()
                stack.append(self.find(module, name))
            case "REDUCE":
                arguments, token = self.pop(), self.pop()
                stack.append(self.reduce(token, arguments))
            case "BUILD":
                state = self.pop()
                self.build(self.top(object), state)
            case _:
                raise _Refused(f"the instruction {opcode}")

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise ValueError("nothing on the stack")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or self.stack[-1] is _MARK or not isinstance(self.stack[-1], kind):
            raise ValueError(f"no {kind.__name__} on the stack")
        return self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        place = next((i for i in range(len(self.stack) - 1, -1, -1) if self.stack[i] is _MARK), None)
        if place is None:
            raise ValueError("no mark on the stack")
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def set_items(self, items: list[Any]) -> None:
        mapping = self.top(dict)
        if len(items) % 2:
            raise ValueError("a key without a value")
        for key, item in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, bytes)):
                raise _Refused(f"a key that is {_kind(key)}")
            mapping[key if isinstance(key, str) else key.decode("latin-1")] = item

    def find(self, module: Any, name: Any) -> _Token:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("a name that is no string")
        if (module, name) not in _ADMITTED:
            raise _Refused(f"the name {f'{module}.{name}'[:100]!r}")
        return _Token(name)

    def reduce(self, token: Any, arguments: Any) -> Any:
        if not isinstance(token, _Token):
            raise _Refused(f"a call of {_kind(token)}")
        match token.name, arguments:
            case "_reconstruct", (_Token(name="ndarray"), (0,), "b" | b"b"):
                return _Array()
            case "dtype", (str(code), 0 | 1, 0 | 1) if code in _KINDS:
                return _DType(code)
            case "encode", (str(text), "latin1" | "latin-1"):
                return self.encode(text)
        raise _Refused(f"{token.name} of {_shown(arguments)}")

    def encode(self, text: str) -> bytes:
        self.bytes_left -= len(text)
        if self.bytes_left < 0:
            raise _Refused("strings that are encoded again and again")
        return text.encode("latin-1")

    def build(self, target: Any, state: Any) -> None:
        match target, state:
            case _DType(), (3, str(order), None, None, None, -1, -1, 0) if order in _BYTE_ORDERS:
                target.order = order
            case _Array(array=None), (1, tuple(shape), _DType() as dtype, bool(is_fortran), str() | bytes() as content):
                raw = self.encode(content) if isinstance(content, str) else content  # Python 2's strings are bytes
                target.array = _make_array(shape, np.dtype(dtype.order + dtype.code), is_fortran, raw)
            case _:
                raise _Refused(f"a state of {_kind(target)} that is {_shown(state)}")


def _make_array(shape: tuple[Any, ...], dtype: np.dtype, is_fortran: bool, raw: bytes) -> np.ndarray:
    if len(shape) > _MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise _Refused(f"an array of shape {_shown(shape)}")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise _Refused(f"an array of shape {_shown(shape)} and type {dtype} with {len(raw):,} bytes")
    return np.frombuffer(raw, dtype=dtype).reshape(shape, order="F" if is_fortran else "C")


def _kind(value: Any) -> str:
    return f"the name {value.name}" if isinstance(value, _Token) else f"of type {type(value).__name__.strip('_')}"


def _shown(value: Any) -> str:
    """Its items in brief: a hostile value may be huge, or hold itself."""
    if not isinstance(value, tuple):
        return _kind(value)
    return f"({', '.join(map(_item_shown, value[:5]))}{', …' if len(value) > 5 else ''})"


def _item_shown(item: Any) -> str:
    if isinstance(item, (str, bytes)):
        return repr(item[:16])
    return repr(item)[:24] if isinstance(item, int) or item is None else _kind(item)
