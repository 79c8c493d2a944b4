"""The ONNX graph in a network's file: how the network is wired, without its weights, which lie in the file beside it.

A node takes a weight by the name of its tensor in the file; a factor is taken as its layer holds it. This is what
`net.save` writes and a session opens, as bytes: reading them needs no ONNX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from decomposable_edge.fields import MOST, Fields, require
from decomposable_edge.sizing.record import Arrays

GRAPH = "onnx/graph"
"""What its bytes are called in the file."""

_MOST_LENGTH = 1 << 28


def take_graph(arrays: Arrays) -> Any:
    """Return its bytes among the tensors of a file, left where they lie."""
    return arrays.take_as(GRAPH, ("uint8",), (arrays.count(GRAPH),))


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceGraph:
    """A graph, and what is known of its inputs.

    Attributes:
        content: an ONNX model.
        lengths: of the axes that vary besides the batch, in the example input.
        values: by the name of an input, the smallest and the largest whole number that it may be given.
    """

    content: bytes = field(repr=False)
    lengths: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Return what a file's description says of it."""
        return {"lengths": dict(self.lengths), "values": {name: list(pair) for name, pair in self.values.items()}}

    @classmethod
    def read(cls, value: object, content: bytes) -> DeviceGraph:
        """Return the graph of these bytes that a description speaks of."""
        top = Fields(value, "onnx")
        lengths, pairs = Fields(top.get("lengths"), "lengths"), top.mapping("values")
        for name, pair in pairs.items():
            is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(v) is int and abs(v) < MOST for v in pair)
            require(is_pair and pair[0] <= pair[1], f"the values of '{name:.60}' are {pair!r:.60}")
        known = {name: lengths.integer(name, 1, _MOST_LENGTH) for name in top.mapping("lengths")}
        return cls(content=content, lengths=known, values={name: tuple(pair) for name, pair in pairs.items()})
