"""A network as a device has it: what the file holds, every claim checked, and its weights where they lie."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from decomposable_edge.device_graph import DeviceGraph, take_graph
from decomposable_edge.fields import Fields, require
from decomposable_edge.file.container import Array, Container, InNumpy, Stored, naming
from decomposable_edge.graph import Use, Wiring, attribute, check_geometry, find_foldable, find_uses
from decomposable_edge.onnx_model import is_recurrence, parse_model, type_name
from decomposable_edge.recurrent import Recurrence
from decomposable_edge.sizing.cost import LayerShape
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.record import (
    Arrays,
    check_stored,
    check_tuned,
    factor_names,
    read_layer,
    read_selector,
    read_statistics,
    read_tuned,
    state_name,
)
from decomposable_edge.weights import LayerWeights, Statistics, Tuned

_MOST_INPUTS = 1 << 28  # numbers of one sample: nobody is made to take memory for a claim
_NO_GRAPH = (
    "it holds no ONNX graph, which a device needs; allowed: a file of net.save(path, onnx=True), or of "
    "decomposable export FILE --any-size"
)
State = Mapping[str, Stored[Array]]


@dataclass(frozen=True, kw_only=True)
class Port:
    """An input or output: its name, its shape with names for what may vary, and numpy's name of its type.

    `values` are the smallest and the largest whole number that an input may be given, where it takes whole numbers.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    values: tuple[int, int] = (0, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredNetwork:
    """A network at every size. The file stays open as long as this is there."""

    path: Path
    model: onnx.ModelProto  # without its weights
    wiring: Wiring
    tensors: Mapping[str, Array]  # what its nodes take at every size
    computed: frozenset[int]  # nodes that are not needed, as what they make is among the tensors
    layers: tuple[LayerWeights, ...]
    uses: Mapping[str, tuple[Use, ...]]  # where the graph has each layer; nowhere if only training uses it
    recurrences: Mapping[int, Recurrence]  # its recurrent layers, by node, which may use decomposed ones inside
    foldable: Mapping[int, int]  # for every batch normalisation that can be folded, the node that takes it in
    selector: RankSelector
    statistics: Statistics | None
    tuned: Tuned | None  # scales, shifts and biases of their own that sizes have
    lacks_statistics: bool  # whether batch normalisation has those of the full network at every size
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    lengths: Mapping[str, int]  # of the axes that vary besides the batch, in the example input
    info: Mapping[str, Any]  # what the network's maker stored with it, such as measured accuracies


def open_network(path: str | os.PathLike[str]) -> StoredNetwork:
    """Return the network of a file of `net.save`; raise `ArtifactError` for any other file."""
    with naming(path):
        return _parsed(Container(path, InNumpy()))


def _parsed(container: Container[Array]) -> StoredNetwork:
    top, arrays = Fields(container.description, "the file"), Arrays(container.tensors, Stored.all, "tensor")
    kind = top.get("kind")
    require(kind == "network", f"it holds {kind!r:.40}, not a network at every size; allowed: a file of net.save()")
    require(top.get("onnx") is not None, _NO_GRAPH)
    graph = DeviceGraph.read(top.get("onnx"), take_graph(arrays).all().tobytes())
    model, constants = parse_model(graph.content)
    wiring = Wiring(model.graph)
    entries = top.records("state")  # a tensor that is another one is not there again
    state = {key: arrays.take(state_name(key)) for key, entry in entries.items() if not entry.has("same_as")}
    layers = tuple(_read_layer(read_layer(record), state, wiring, arrays) for record in top.record_list("layers"))
    require(0 < len(layers) == len({layer.name for layer in layers}), "there is no layer, or one is there twice")
    selector, statistics, tuned = _read_sizes(top, layers, state, arrays)
    weights = {name: stored for key, stored in state.items() if wiring.takers(name := state_name(key))}
    shapes = {name: tuple(each.shape) for name, each in (constants | weights).items()}
    factors = {name: shape for layer in layers for name, shape in zip(layer.names, _held_shapes(layer), strict=True)}
    inputs = tuple(_port(value, graph.values.get(value.name, (0, 1))) for value in model.graph.input)
    outputs = tuple(_port(value) for value in model.graph.output)
    require(bool(inputs) and bool(outputs), "it has no input or no output")
    made = {*wiring.makers, *(port.name for port in inputs)}
    require(not (shapes.keys() | factors.keys()) & made, "a weight is an input, or a node makes it")
    require(not constants.keys() & (weights.keys() | factors.keys()), "a constant is called as a weight is")
    recurrences = {i: Recurrence.of(node) for i, node in enumerate(wiring.nodes) if is_recurrence(node)}
    for one in recurrences.values():
        one.check(shapes | factors)
    tensors, computed = _transposed(wiring, weights, set(map(state_name, tuned.names if tuned else ())))
    return StoredNetwork(
        path=container.path,
        model=model,
        wiring=wiring,
        tensors=constants | tensors,
        computed=computed,
        layers=layers,
        uses={layer.name: _uses(wiring, layer, recurrences) for layer in layers},
        recurrences=recurrences,
        foldable=find_foldable(wiring, shapes | factors),
        selector=selector,
        statistics=statistics,
        tuned=tuned,
        lacks_statistics=statistics is None and any(key.endswith("running_mean") for key in state),
        inputs=inputs,
        outputs=outputs,
        lengths=graph.lengths,
        info=top.mapping("info"),
    )


def _read_layer(layer: LayerShape, state: State, wiring: Wiring, arrays: Arrays) -> LayerWeights:
    names, key = factor_names(layer), f"{layer.name}.weight" if layer.name else "weight"
    stages = tuple(arrays.take(name) for name in names)
    check_stored(layer, stages)
    is_there = key in state and tuple(state[key].shape) == layer.chain.held_shape
    require(is_there and state[key].dtype == stages[0].dtype, f"layer '{layer.name:.60}' has no weight of its shape")
    is_used = any(wiring.takers(name) for name in names)
    return LayerWeights(**vars(layer), stages_stored=stages, dense_stored=state[key], is_used=is_used)


def _held_shapes(layer: LayerWeights) -> list[tuple[int, ...]]:
    """Return the shapes of the stages with all bases, as their layers hold them."""
    shapes = zip(layer.chain.shapes(layer.kept), layer.chain.swapped, strict=True)
    return [(shape[1], shape[0], *shape[2:]) if is_swapped else shape for shape, is_swapped in shapes]


def _read_sizes(
    top: Fields, layers: Sequence[LayerWeights], state: State, arrays: Arrays
) -> tuple[RankSelector, Statistics | None, Tuned | None]:
    """Return what a choice of size depends on, and what is known of sizes, of which rows are read when one is set."""
    ranks = np.array([rank for layer in layers for rank in layer.kept], np.int64)
    selector = read_selector(top, layers, ranks, arrays)
    selector.prepare()
    shapes = {key: tuple(stored.shape) for key, stored in state.items()}
    statistics = read_statistics(top, selector, shapes, arrays, Statistics)
    tuned = read_tuned(top, selector, shapes, arrays, Tuned)
    arrays.require_all_taken()
    if statistics is not None:
        statistics = replace(statistics, original=tuple(each.all() for each in statistics.original))
    if tuned is not None:
        tuned = replace(tuned, original=tuple(each.all() for each in tuned.original))
        rows = (tuned.values_ST[i] for i in range(len(tuned.plans)))  # one at a time
        check_tuned(all(bool(np.isfinite(row).all()) for row in (*tuned.original, *rows)))
        are_numbers = all(state[name].dtype.startswith("float") for name in tuned.names)
        require(are_numbers, "a tuned vector is not of numbers with a fraction")
    return selector, statistics, tuned


def _transposed(wiring: Wiring, weights: State, changing: set[str]) -> tuple[dict[str, Array], frozenset[int]]:
    """Return the weights that are the same at every size, and nodes that are not needed any more.

    Those that a node transposes are so already: the runtime would do it again for every size.
    """
    tensors: dict[str, Array] = {}
    computed: set[int] = set()
    for name, stored in weights.items():
        values = stored.all()
        for index, place in wiring.takers(name):
            node = wiring.nodes[index]
            axes = attribute(node, "perm", list[int]()) if node.op_type == "Transpose" and place == 0 else []
            if name in changing or sorted(axes) != list(range(values.ndim)) or not axes:
                tensors[name] = values
            elif node.output[0] not in wiring.outputs:
                tensors[node.output[0]] = np.ascontiguousarray(values.transpose(axes))
                computed.add(index)
    return tensors, frozenset(computed)


def _uses(wiring: Wiring, layer: LayerWeights, recurrences: Mapping[int, Recurrence]) -> tuple[Use, ...]:
    """Return where the graph has a layer; inside of recurrent ones, all its stages have to be there in a row."""
    what = f"layer '{layer.name:.60}'"
    uses = find_uses(wiring, layer.name, layer.names, {i: one.ih for i, one in recurrences.items()})
    chains = [chain for one in recurrences.values() for chain in (one.hh, one.hr)]
    inside = [chain for chain in chains if set(chain) & set(layer.names)]
    require(all(chain == layer.names for chain in inside), f"{what}: its parts do not match")
    require(bool(uses or inside) == layer.is_used, f"{what}: its weights are not where they should be")
    is_convolution = len(layer.shape) > 2
    for use in uses:
        for index, kernel, is_swapped in zip(use.nodes, layer.chain.kernels, layer.chain.swapped, strict=True):
            node = wiring.nodes[index]
            kinds = ("ConvTranspose",) if is_swapped else ("Conv",) if is_convolution else ("Gemm", "MatMul")
            is_end = not is_convolution and index in recurrences and index == use.nodes[-1]
            require(is_end or node.op_type in kinds, f"{what} of shape {layer.shape} is a {node.op_type:.40}")
            if is_convolution:
                check_geometry(node, kernel, layer.name)
    return uses


def _port(value: onnx.ValueInfoProto, values: tuple[int, int] = (0, 1)) -> Port:
    """Return an input or output of the graph; `values` are the whole numbers that an input may be given."""
    kind = value.type.tensor_type
    dtype = type_name(kind.elem_type) if value.type.HasField("tensor_type") else None
    require(dtype is not None and kind.HasField("shape"), f"'{value.name:.60}' is no array of a known type")
    assert dtype is not None
    dims = kind.shape.dim
    require(all(dim.dim_value >= 0 for dim in dims), f"'{value.name:.60}' has a negative extent")
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims)
    known = math.prod(size for size in shape if isinstance(size, int))
    require(known <= _MOST_INPUTS, f"'{value.name:.60}' has the shape {shape!s:.80}")
    return Port(name=value.name, shape=shape, dtype=dtype, values=values)
