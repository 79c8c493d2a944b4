"""Where in a network's graph the decomposed layers are, and which batch normalisation can be folded into what.

    x ── first/{layer} ── (Pad) ── second/{layer} ── (…) ── BatchNormalization ── …

A layer stands in the graph as a chain of nodes for every place where it is used. They take its weights by the names
that these have in the file. The nodes are found with this code, so a file need not say which they are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import onnx
from onnx import AttributeProto, NodeProto, helper

from decomposable_edge.fields import require
from decomposable_edge.onnx_model import graphs_of, inner_graphs
from decomposable_edge.sizing.chain import ORDINALS

Value = TypeVar("Value", int, float, bytes, list[int])
_KINDS = {int: AttributeProto.INT, float: AttributeProto.FLOAT, bytes: AttributeProto.STRING, list: AttributeProto.INTS}


@dataclass(frozen=True)
class Use:
    """One place where a layer is used: the indices of its nodes, in order, and for each but the last one the index of
    the node that takes its output.
    """

    nodes: tuple[int, ...]
    entries: tuple[int, ...]


def captured(node: NodeProto) -> set[str]:
    """The values from around it that a node's inner graphs use."""
    graphs = [graph for inner in inner_graphs(node) for graph in graphs_of(inner)]
    taken = {name for graph in graphs for node in graph.node for name in node.input}
    return taken | {value.name for graph in graphs for value in graph.output}


class Wiring:
    """Who takes which value, and who makes it, by index of the nodes."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.nodes: Sequence[NodeProto] = tuple(graph.node)
        self.outputs = {value.name for value in graph.output}
        self.makers: dict[str, int] = {}
        self._takers: dict[str, list[tuple[int, int]]] = defaultdict(list)
        given = {value.name for value in (*graph.input, *graph.initializer)}
        for i, node in enumerate(self.nodes):
            for place, name in enumerate(node.input):
                self._takers[name].append((i, place))
            for name in captured(node):
                self._takers[name].append((i, -1))
            for name in filter(None, node.output):
                require(name not in given and name not in self.makers, f"value '{name:.60}' is made twice")
                self.makers[name] = i

    def takers(self, value: str) -> list[tuple[int, int]]:
        """The nodes that take a value, each with the place among its inputs; -1 for what is inside a node."""
        return self._takers.get(value, [])

    def only_taker(self, value: str) -> tuple[int, int] | None:
        """The one node that takes a value, if there is just one and nobody else sees it."""
        takers = self.takers(value)
        return takers[0] if len(takers) == 1 and value not in self.outputs else None


def attribute(node: NodeProto, name: str, default: Value) -> Value:
    """What a node says under a name, which has to be of the default's kind; the default where it says nothing."""
    found = [one for one in node.attribute if one.name == name]
    is_right = len(found) <= 1 and all(one.type == _KINDS[type(default)] for one in found)
    require(is_right, f"'{name}' of node '{node.name:.60}' is not of its kind, or there twice")
    value: Value = helper.get_attribute_value(found[0]) if found else default
    return value


def find_uses(wiring: Wiring, layer: str, names: Sequence[str], loops: Container[int] = ()) -> tuple[Use, ...]:
    """All places where a layer is used whose stages have these names; none where only training or these loops do."""
    stages = [_multiplying(wiring, layer, name, loops) for name in names]
    uses = [_followed(wiring, layer, first, stages) for first in stages[0]]
    for i in range(1, len(names)):
        require(len({use.nodes[i] for use in uses}) == len(stages[i]), f"layer '{layer}': its parts do not match")
    return tuple(uses)


def _followed(wiring: Wiring, layer: str, first: int, stages: Sequence[Sequence[int]]) -> Use:
    """The use that begins with a node: on to the nodes of the other stages, and by nothing but padding."""
    nodes, entries = [first], []
    for ordinal, behind in zip(ORDINALS, stages[1:], strict=False):
        here = nodes[-1]
        require(not any(wiring.nodes[here].input[2:]), f"layer '{layer}': its {ordinal} part has a bias")
        after = _next(wiring, here, layer)
        entries.append(after)
        seen = {here}
        while wiring.nodes[after].op_type == "Pad" and after not in seen:
            seen.add(after)
            after = _next(wiring, after, layer)
        require(after in behind, f"layer '{layer}': its {ordinal} part leads to {wiring.nodes[after].op_type:.40}")
        nodes.append(after)
    kinds = {wiring.nodes[index].op_type for index in nodes}
    require(len(kinds) == 1 or kinds == {"Conv", "ConvTranspose"}, f"layer '{layer}': its parts are of two kinds")
    return Use(tuple(nodes), tuple(entries))


def _next(wiring: Wiring, index: int, layer: str) -> int:
    node = wiring.nodes[index]
    taker = wiring.only_taker(node.output[0]) if len(node.output) == 1 else None
    require(taker is not None and taker[1] == 0, f"layer '{layer}': what lies between its parts is used elsewhere")
    assert taker is not None
    return taker[0]


def _multiplying(wiring: Wiring, layer: str, weight: str, loops: Container[int]) -> list[int]:
    """The nodes that multiply by a weight: directly, or by what a Transpose makes of it. Not those inside of loops."""
    found = []
    for i, place in wiring.takers(weight):
        node = wiring.nodes[i]
        if i in loops and place < 0:
            continue
        if node.op_type == "Transpose" and place == 0 and attribute(node, "perm", list[int]()) == [1, 0]:
            for j, where in wiring.takers(node.output[0]):
                is_factor = (wiring.nodes[j].op_type, where) == ("MatMul", 1)
                require(is_factor, f"layer '{layer}': {weight} is not multiplied by")
                found.append(j)
            require(node.output[0] not in wiring.outputs, f"layer '{layer}': {weight} is an output")
        else:
            require(place == 1 and _is_plain(node), f"layer '{layer}': {node.op_type:.40} uses {weight}")
            found.append(i)
    require(weight not in wiring.outputs and weight not in wiring.makers, f"layer '{layer}': {weight} is no weight")
    return found


def _is_plain(node: NodeProto) -> bool:
    """A convolution without groups whose padding is in numbers, or x Wᵀ + b."""
    if node.op_type in ("Conv", "ConvTranspose"):
        if any(one.name == "output_shape" for one in node.attribute):  # then the padding follows from that
            return False
        return attribute(node, "group", 1) == 1 and attribute(node, "auto_pad", b"NOTSET") == b"NOTSET"
    if node.op_type != "Gemm":
        return False
    is_linear = (attribute(node, "transA", 0), attribute(node, "transB", 0)) == (0, 1)
    return is_linear and attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0


def merged_attributes(nodes: Sequence[NodeProto], kernel: Sequence[int]) -> dict[str, list[int]]:
    """The geometry of the one convolution that a chain stands for: along each axis, all of them but one do nothing.

    >>> from onnx import helper
    >>> first = helper.make_node("Conv", ["x", "a"], ["z"], pads=[0, 1, 0, 1], strides=[1, 2])
    >>> second = helper.make_node("Conv", ["z", "b"], ["y"], pads=[1, 0, 1, 0], strides=[2, 1])
    >>> merged_attributes([first, second], [3, 3])
    {'kernel_shape': [3, 3], 'strides': [2, 2], 'dilations': [1, 1], 'pads': [1, 1, 1, 1]}

    What a transposed one adds to its output (`output_padding`) is there, too, where one of them is.
    """

    def all_of(name: str, default: list[int]) -> list[tuple[int, ...]]:
        return list(zip(*(attribute(node, name, default) for node in nodes), strict=True))

    ones, zeros = [1] * len(kernel), [0] * (2 * len(kernel))
    merged = {
        "kernel_shape": list(kernel),
        "strides": [math.prod(each) for each in all_of("strides", ones)],
        "dilations": [math.prod(each) for each in all_of("dilations", ones)],
        "pads": [sum(each) for each in all_of("pads", zeros)],
    }
    if any(node.op_type == "ConvTranspose" for node in nodes):
        merged["output_padding"] = [sum(each) for each in all_of("output_padding", zeros[: len(kernel)])]
    return merged


def check_geometry(node: NodeProto, kernel: Sequence[int], layer: str) -> None:
    """Refuse a convolution that is not of this kernel, or whose numbers are absurd."""
    is_right, axes = attribute(node, "kernel_shape", list(kernel)) == list(kernel), len(kernel)
    sizes = (("strides", axes, 1), ("dilations", axes, 1), ("pads", 2 * axes, 0), ("output_padding", axes, 0))
    for name, length, least in sizes:
        values = attribute(node, name, [least] * length)
        is_right = is_right and len(values) == length and all(least <= value < 1 << 20 for value in values)
    require(is_right, f"layer '{layer:.60}': node '{node.name:.60}' has a geometry that cannot be")


def outputs_axis(node: NodeProto) -> int:
    """Along which axis of its weight the outputs of a layer lie."""
    return 1 if node.op_type == "ConvTranspose" else 0


def find_foldable(wiring: Wiring, shapes: Mapping[str, tuple[int, ...]]) -> dict[int, int]:
    """For every batch normalisation that directly follows a convolution or linear layer, the latter's node.

    Nothing else may see what lies between them, and all that takes part has to be a weight. A linear layer on more than
    two axes is a MatMul and left alone: its channels are not those that are normalised. `shapes` are the weights'.
    """
    found = {}
    for i, node in enumerate(wiring.nodes):
        is_norm = node.op_type == "BatchNormalization" and len(node.input) == 5 and sum(map(bool, node.output)) == 1
        before = wiring.makers.get(node.input[0]) if is_norm else None
        if before is None or attribute(node, "training_mode", 0):
            continue
        has_number = 0 <= attribute(node, "epsilon", 1e-5) < math.inf
        maker = wiring.nodes[before]
        is_plain = maker.op_type in ("ConvTranspose", "Gemm") and _is_plain(maker)  # of one group, then
        is_layer = maker.op_type == "Conv" or is_plain
        at = outputs_axis(maker)
        outputs = shapes.get(maker.input[1], ())[at : at + 1] if len(maker.input) > 1 else ()
        per_output = [*node.input[1:], *(name for name in maker.input[2:] if name)]
        is_layer = is_layer and bool(outputs) and all(shapes.get(name) == outputs for name in per_output)
        if is_layer and has_number and len(maker.output) == 1 and wiring.only_taker(node.input[0]) == (i, 0):
            found[i] = before
    return found
