"""An ONNX file without the values of its large tensors: what is left is small, and says where they lie.

Protobuf writes a message as fields, each with its number and, if it has parts, its length:

    model ─┬─ graph ─── initializer ─── raw_data               ← left out where it is large
           ├─ functions ─── node ─── attribute ─── t ─── raw_data
           └─ …                                                ← all else is taken as it is
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx

from decomposable_edge.fields import Damaged, require
from decomposable_edge.source import Source

Place = tuple[int, int]
"""Where values lie in the file: the first byte, and how many."""
Key = tuple[int, ...]
"""Which tensor: the field, then its number among those of each level."""

SMALL = 1024  # bytes that may as well stay
_MOST_FIELDS = 1 << 22
_LENGTH_DELIMITED, _FIXED = 2, {1: 8, 5: 4}


def _number(message: Any, name: str) -> int:
    return int(message.DESCRIPTOR.fields_by_name[name].number)


GRAPH, FUNCTIONS = (_number(onnx.ModelProto, name) for name in ("graph", "functions"))
_TENSOR: dict[int, Any] = {_number(onnx.TensorProto, "raw_data"): None}
_ATTRIBUTE = {_number(onnx.AttributeProto, "t"): _TENSOR}
_SPINE: dict[int, Any] = {
    GRAPH: {_number(onnx.GraphProto, "initializer"): _TENSOR},
    FUNCTIONS: {_number(onnx.FunctionProto, "node"): {_number(onnx.NodeProto, "attribute"): _ATTRIBUTE}},
}


def outline(source: Source) -> tuple[bytes, dict[Key, Place]]:
    """The model without its large tensors' values, and where these lie.

    The keys are (GRAPH, i) for the i-th initializer, and (FUNCTIONS, i, j, k) for attribute k of node j of function i.
    """
    walk = _Walk(source)
    return walk.light(0, source.size, _SPINE, ()), walk.places


class _Walk:
    def __init__(self, source: Source) -> None:
        self.source, self.places = source, dict[Key, Place]()
        self._fields = 0

    def light(self, begin: int, end: int, spine: dict[int, Any], key: Key) -> bytes:
        """A message without its large tensors' values."""
        kept, seen = [], dict[int, int]()
        for number, start, value, stop in self._fields_of(begin, end):
            if number not in spine or value is None:
                kept.append(self.source.read(start, stop - start))
                continue
            count = seen[number] = seen.get(number, 0) + 1
            below = spine[number]
            if below is None:  # values
                require(count == 1, "a tensor has its values twice")
                if stop - value <= SMALL:
                    kept.append(self.source.read(start, stop - start))
                else:
                    self.places[key] = (value, stop - value)
                continue
            own = self._key(key, spine, number, count)
            content = self.light(value, stop, below, own)
            kept += [_varint(number << 3 | _LENGTH_DELIMITED), _varint(len(content)), content]
        return b"".join(kept)

    def _key(self, key: Key, spine: dict[int, Any], number: int, count: int) -> Key:
        """The name of a part; of those that there may be only one of, there is."""
        if spine is _SPINE and number == GRAPH:
            require(count == 1, "it has two graphs")
            return (GRAPH,)
        if spine is _ATTRIBUTE:
            require(count == 1, "an attribute has two tensors")
            return key
        return (*(key or (number,)), count - 1)

    def _fields_of(self, begin: int, end: int) -> Iterator[tuple[int, int, int | None, int]]:
        """Number, start, where the content begins if it has a length, and the end of every field."""
        at = begin
        while at < end:
            self._fields += 1
            require(self._fields <= _MOST_FIELDS, f"it has more than {_MOST_FIELDS:,} parts")
            start = at
            tag, at = self._number(at, end)
            kind, value = tag & 7, None
            if kind == _LENGTH_DELIMITED:
                length, value = self._number(at, end)
                at = value + length
            elif kind == 0:
                _, at = self._number(at, end)
            else:
                require(kind in _FIXED, "not an ONNX model")
                at += _FIXED[kind]
            require(at <= end, "not an ONNX model")
            yield tag >> 3, start, value, at

    def _number(self, at: int, end: int) -> tuple[int, int]:
        """A number of variable length, and where it ends."""
        content = self.source.read(at, min(10, end - at))
        number = 0
        for i, byte in enumerate(content):
            number |= (byte & 0x7F) << (7 * i)
            if byte < 0x80:
                return number, at + i + 1
        raise Damaged("not an ONNX model")


def _varint(number: int) -> bytes:
    content = bytearray()
    while number > 0x7F:
        content.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*content, number])
