"""Where in a network's graph the decomposed layers are, and which batch normalisation can be folded into what.

    x ── first/{layer} ── (Pad) ── second/{layer} ── (…) ── BatchNormalization ── …

A layer stands in the graph as a chain of nodes for every place where it is used. They take its weights by the names
that these have in the file. The nodes are found with this code, so a file need not say which they are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import onnx
from onnx import AttributeProto, NodeProto, helper

from decomposable_edge.fields import require
from decomposable_edge.onnx_model import graphs_of, inner_graphs

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
    """Return the values from around it that a node's inner graphs use."""
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
            for place, name in (*enumerate(node.input), *((-1, name) for name in captured(node))):
                self._takers[name].append((i, place))
            for name in filter(None, node.output):
                require(name not in given and name not in self.makers, f"value '{name:.60}' is made twice")
                self.makers[name] = i

    def takers(self, value: str) -> list[tuple[int, int]]:
        """Return the nodes that take a value, each with the place among its inputs; -1 for what is inside a node."""
        return self._takers.get(value, []) if value else []

    def only_taker(self, value: str) -> tuple[int, int]:
        """Return the one node that takes a value; (-1, -1) where there are others, or somebody else sees it."""
        takers = self.takers(value)
        return takers[0] if len(takers) == 1 and value not in self.outputs else (-1, -1)


def attribute(node: NodeProto, name: str, default: Value) -> Value:
    """Return what a node says under a name, which has to be of the default's kind; the default for nothing."""
    found = [one for one in node.attribute if one.name == name]
    is_right = len(found) <= 1 and all(one.type == _KINDS[type(default)] for one in found)
    require(is_right, f"'{name}' of node '{node.name:.60}' is not of its kind, or there twice")
    value: Value = helper.get_attribute_value(found[0]) if found else default
    return value


def find_uses(wiring: Wiring, layer: str, names: Sequence[str], ends: Mapping[int, str]) -> tuple[Use, ...]:
    """Return all places where a layer is used whose stages have these names; none where only training uses it.

    `ends` are recurrent layers, by node, with the weight that each of them multiplies its input by. What they do with
    the other weights that they take is no use of this kind.
    """
    stages = [_multiplying(wiring, layer, name, ends) for name in names]
    uses = [_followed(wiring, layer, first, stages[1:]) for first in stages[0]]
    for i, stage in enumerate(stages):
        require(len({use.nodes[i] for use in uses}) == len(stage), f"layer '{layer}': its parts do not match")
    return tuple(uses)


def _multiplying(wiring: Wiring, layer: str, weight: str, ends: Mapping[int, str]) -> list[int]:
    """Return the nodes that multiply by a weight: directly, or by what a Transpose makes of it."""
    found = []
    for i, place in wiring.takers(weight):
        node = wiring.nodes[i]
        if i in ends:
            found += [i] if weight == ends[i] else []
        elif node.op_type == "Transpose" and place == 0 and attribute(node, "perm", list[int]()) == [1, 0]:
            products = wiring.takers(node.output[0])
            are_products = all((wiring.nodes[j].op_type, at) == ("MatMul", 1) for j, at in products)
            require(are_products, f"layer '{layer}': {weight} is not multiplied by")
            require(node.output[0] not in wiring.outputs, f"layer '{layer}': {weight} is an output")
            found += [j for j, _ in products]
        else:
            require(place == 1 and _is_plain(node), f"layer '{layer}': {node.op_type:.40} uses {weight}")
            found.append(i)
    require(weight not in wiring.outputs and weight not in wiring.makers, f"layer '{layer}': {weight} is no weight")
    return found


def _followed(wiring: Wiring, layer: str, first: int, later: Sequence[Sequence[int]]) -> Use:
    """Return the use that begins with a node: on to the nodes of the other stages, and by nothing but padding."""
    nodes, entries = [first], []
    for stage in later:
        require(not any(wiring.nodes[nodes[-1]].input[2:]), f"layer '{layer}': a part in front has a bias")
        entries.append(_next(wiring, nodes[-1], layer))
        after = entries[-1]
        while wiring.nodes[after].op_type == "Pad":  # this ends: no value is made twice
            after = _next(wiring, after, layer)
        require(after in stage, f"layer '{layer}': a part of it leads to {wiring.nodes[after].op_type:.40}")
        nodes.append(after)
    return Use(tuple(nodes), tuple(entries))


def _next(wiring: Wiring, index: int, layer: str) -> int:
    outputs = wiring.nodes[index].output
    taker, place = wiring.only_taker(outputs[0]) if len(outputs) == 1 else (-1, -1)
    require(place == 0, f"layer '{layer}': what lies between its parts is used elsewhere")
    return taker


def _is_plain(node: NodeProto) -> bool:
    """Return whether it is a convolution without groups whose padding is in numbers, or x Wᵀ + b."""
    if node.op_type in ("Conv", "ConvTranspose"):
        if any(one.name == "output_shape" for one in node.attribute):  # then the padding follows from that
            return False
        return attribute(node, "group", 1) == 1 and attribute(node, "auto_pad", b"NOTSET") == b"NOTSET"
    is_linear = node.op_type == "Gemm" and (attribute(node, "transA", 0), attribute(node, "transB", 0)) == (0, 1)
    return is_linear and attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0


def merged_attributes(nodes: Sequence[NodeProto], kernel: Sequence[int]) -> dict[str, list[int]]:
    """Return the geometry of the one convolution that a chain stands for: along each axis, all but one do nothing.

    What a transposed one adds to its output (`output_padding`) is there, too, where one of them is.

    >>> from onnx import helper
    >>> first = helper.make_node("Conv", ["x", "a"], ["z"], pads=[0, 1, 0, 1], strides=[1, 2])
    >>> second = helper.make_node("Conv", ["z", "b"], ["y"], pads=[1, 0, 1, 0], strides=[2, 1])
    >>> merged_attributes([first, second], [3, 3])
    {'kernel_shape': [3, 3], 'strides': [2, 2], 'dilations': [1, 1], 'pads': [1, 1, 1, 1]}
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
    """Return along which axis of its weight the outputs of a layer lie."""
    return 1 if node.op_type == "ConvTranspose" else 0


def find_foldable(wiring: Wiring, shapes: Mapping[str, tuple[int, ...]]) -> dict[int, int]:
    """Return for every batch normalisation that directly follows a convolution or linear layer the latter's node.

    Nothing else may see what lies between them, and all that takes part has to be a weight. A linear layer on more than
    two axes is a MatMul and left alone: its channels are not those that are normalised. `shapes` are the weights'.
    """
    found = {}
    for i, node in enumerate(wiring.nodes):
        is_norm = node.op_type == "BatchNormalization" and len(node.input) == 5 and sum(map(bool, node.output)) == 1
        before = wiring.makers.get(node.input[0]) if is_norm else None
        if before is None or attribute(node, "training_mode", 0):
            continue
        maker, at = wiring.nodes[before], outputs_axis(wiring.nodes[before])
        is_plain = maker.op_type in ("ConvTranspose", "Gemm") and _is_plain(maker)  # of one group, then
        outputs = shapes.get(maker.input[1], ())[at : at + 1] if len(maker.input) > 1 else ()
        per_output = [*node.input[1:], *filter(None, maker.input[2:])]
        is_layer = (maker.op_type == "Conv" or is_plain) and bool(outputs)
        is_layer = is_layer and all(shapes.get(name) == outputs for name in per_output)
        has_number = 0 <= attribute(node, "epsilon", 1e-5) < math.inf
        if is_layer and has_number and len(maker.output) == 1 and wiring.only_taker(node.input[0]) == (i, 0):
            found[i] = before
    return found
