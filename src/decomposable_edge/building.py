"""From a network and a plan to the ONNX model of that size.

    stages at ranks r ───────┬─ a node for each, with slices of the weights
                             └─ one node with W̃, where the plan says dense: all but the last are taken out, and
                                that one takes the geometry of all
    batch normalisation ─────── part of the node before it, where it can be, with the statistics of this size
    tuned vectors ───────────── those of this size, before that
    recurrent layers ────────── a Scan with these weights inside; one operator, where the plan says dense

The model comes without its large weights: the runtime is given them as memory, and nothing is copied or serialised that
need not be.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper

from decomposable_edge.file.container import Array
from decomposable_edge.graph import attribute, captured, merged_attributes, outputs_axis
from decomposable_edge.network import LayerWeights, StoredNetwork
from decomposable_edge.onnx_model import RECURRENCE, header_of, tensor_of, type_code
from decomposable_edge.realising import realised
from decomposable_edge.recurrent import as_operator, can_be_operator, in_steps
from decomposable_edge.sizing.plans import RankPlan
from decomposable_edge.sizing.record import state_name

SMALL = 1024  # bytes of a tensor that may as well stay in the model


@dataclass(frozen=True, kw_only=True, eq=False)
class SizeModel:
    """An ONNX model, and the weights that it takes from memory."""

    content: bytes
    weights: dict[str, Array]


def build(network: StoredNetwork, plan: RankPlan) -> SizeModel:
    """Return the model of a size."""
    draft, used = _Draft(network), [layer for layer in network.layers if layer.is_used]
    size = realised(plan, {layer.name: layer for layer in used}, network.statistics, network.tuned)
    for key, values in (*size.statistics.items(), *size.tuned.items()):
        own = draft.tensors.get(state_name(key))
        if own is not None:
            draft.tensors[state_name(key)] = values.astype(own.dtype, copy=False).reshape(own.shape)
    for layer in used:
        found = size.layers[layer.name]
        if found.runs_as == "factors":
            draft.tensors.update(zip(layer.names, found.weights, strict=True))
        else:
            draft.put_dense(layer, found.weights[0])
    for norm, maker in network.foldable.items():
        draft.fold(norm, maker)
    for index in network.recurrences:
        draft.put_recurrence(index)
    return draft.finished()


class _Draft:
    """The graph of one size in the making. Nodes are copied before they are changed."""

    def __init__(self, network: StoredNetwork) -> None:
        self._network, nodes = network, enumerate(network.wiring.nodes)
        self._nodes: dict[int, NodeProto] = {i: node for i, node in nodes if i not in network.computed}
        self._own: set[int] = set()
        self._dense: set[tuple[str, ...]] = set()  # stages in place of which there is one weight
        self._instead: dict[int, list[NodeProto]] = {}
        self.tensors: dict[str, Array] = dict(network.tensors)

    def _node(self, index: int) -> NodeProto:
        """Return the node, to be changed."""
        if index not in self._own:
            self._nodes[index] = copy.deepcopy(self._nodes[index])
            self._own.add(index)
        return self._nodes[index]

    def put_dense(self, layer: LayerWeights, weight: Array) -> None:
        """Put one node where the layer has several, wherever it is used."""
        wiring = self._network.wiring
        *gone, last_name = layer.names
        self._dense.add(layer.names)
        self.tensors[last_name] = weight
        for index in (index for name in gone for index, _ in wiring.takers(name)):
            if wiring.nodes[index].op_type == "Transpose":
                self._nodes.pop(index, None)
        for use in self._network.uses[layer.name]:
            last = self._node(use.nodes[-1])
            for index, entry in zip(use.nodes, use.entries, strict=False):
                self._node(entry).input[0] = self._nodes.pop(index).input[0]
            if last.op_type in ("Conv", "ConvTranspose"):
                merged = merged_attributes([wiring.nodes[index] for index in use.nodes], layer.shape[2:])
                kept = [a for a in last.attribute if a.name not in merged]
                last.op_type = "ConvTranspose" if layer.transposed else "Conv"
                del last.attribute[:]
                last.attribute.extend([*kept, *(helper.make_attribute(k, v) for k, v in merged.items())])

    def fold(self, norm_index: int, maker_index: int) -> None:
        """Make a batch normalisation part of the node before it."""
        norm, maker = self._nodes.pop(norm_index), self._node(maker_index)
        bias = self.tensors[maker.input[2]] if any(maker.input[2:3]) else None
        numbers = (self.tensors[name] for name in norm.input[1:5])
        epsilon, axis = attribute(norm, "epsilon", 1e-5), outputs_axis(maker)
        made = folded(self.tensors[maker.input[1]], bias, *numbers, epsilon=epsilon, axis=axis)
        names = [f"decomposable/{maker_index}/{kind}" for kind in ("weight", "bias")]  # one use, not all of the layer
        self.tensors.update(zip(names, made, strict=True))
        maker.input[:] = [maker.input[0], *names]
        maker.output[0] = norm.output[0]

    def put_recurrence(self, index: int) -> None:
        """Put a recurrent layer with the weights of this size: as an operator, if they are dense, or step by step."""
        one = self._network.recurrences[index]
        hh, hr = (chain[-1:] if chain in self._dense else chain for chain in (one.hh, one.hr))
        one = replace(one, x=self._nodes[index].input[0], hh=hh, hr=hr)
        if can_be_operator(one, self.tensors):
            self._instead[index], weights = as_operator(one, self.tensors)
            self.tensors.update(weights)
        else:
            self._instead[index] = in_steps(one, type_code(self.tensors[one.ih]))

    def finished(self) -> SizeModel:
        """Return the model with the weights that are left in use."""
        source = self._network.model
        ports: Any = {"input": source.graph.input, "output": source.graph.output}
        nodes = [each for index, node in self._nodes.items() for each in self._instead.get(index, [node])]
        graph = onnx.GraphProto(name=source.graph.name or "graph", node=nodes, **ports)
        taken = {name for node in nodes for name in (*node.input, *captured(node))}
        weights = {}
        for name in sorted(taken & self.tensors.keys()):
            array = np.asarray(self.tensors[name], order="C")
            is_large = array.nbytes > SMALL  # else it stays in the model: shapes have to be there
            graph.initializer.append(header_of(name, array) if is_large else tensor_of(name, array))
            if is_large:
                weights[name] = array
        opsets = [each for each in source.opset_import if each.domain != RECURRENCE[0]]
        model = onnx.ModelProto(ir_version=source.ir_version, opset_import=opsets, graph=graph)
        return SizeModel(content=model.SerializeToString(), weights=weights)


def folded(
    weight: Array, bias: Array | None, gamma: Array, beta: Array, mean: Any, var: Any, *, epsilon: float, axis: int = 0
) -> tuple[Array, Array]:
    """Return weight and bias of a layer that takes in the batch normalisation behind it, with a number per channel.

    BN(Wx + b) = s·(Wx + b − mean) + β = (s·W)x + (s·(b − mean) + β),  s = γ/√(var + ε); output channels lie along
    this axis of the weight.

    >>> norm = {"gamma": np.ones(1), "beta": np.ones(1), "mean": np.full(1, 2.0), "var": np.full(1, 0.25)}
    >>> weight, bias = folded(np.array([[3.0]]), None, **norm, epsilon=0.0)  # 3x → (3x − 2) / 0.5 + 1
    >>> weight.tolist(), bias.tolist()
    ([[6.0]], [-3.0])
    """
    with np.errstate(all="ignore"):  # what is no number stays none, as in the network itself
        scale = gamma / np.sqrt(var.astype(np.float64) + epsilon)
        shift = beta - mean * scale
        if bias is not None:
            shift = shift + bias * scale
        along_outputs = scale.astype(weight.dtype).reshape(-1, *(1,) * (weight.ndim - 1 - axis))
        return np.ascontiguousarray(weight * along_outputs), shift.astype(weight.dtype)
