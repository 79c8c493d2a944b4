"""What a bundle holds, read from its file. Damage is found, and the plan data is checked claim by claim."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from decomposable_edge.container import Unsealed, type_name, unseal
from decomposable_edge.errors import ArtifactError
from decomposable_edge.fields import MOST, Damaged, Fields, require
from decomposable_edge.graph import Use, Wiring, check_geometry, factor_names, find_foldable, find_uses
from decomposable_edge.recurrent import Found, check_shapes, find_recurrences
from decomposable_edge.sizing.cost import LayerShape
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.record import (
    BUNDLE,
    Arrays,
    check_held,
    check_tuned,
    is_rank,
    read_layer,
    read_selector,
    read_statistics,
    read_tuned,
)
from decomposable_edge.source import Array, Stored, in_memory
from decomposable_edge.text import one_line
from decomposable_edge.weights import LayerWeights, Statistics, Tuned

_MOST_INPUTS = 1 << 28  # numbers of one sample: nobody is made to take memory for a claim


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
class Bundle:
    """A network at every size, as a device has it."""

    path: Path
    model: onnx.ModelProto  # without its weights
    wiring: Wiring
    tensors: Mapping[str, Array]  # the weights that are no factors
    layers: tuple[LayerWeights, ...]
    uses: Mapping[str, tuple[Use, ...]]  # where the graph has each layer; nowhere if only training uses it
    recurrences: tuple[Found, ...]  # where it has recurrent layers, which may use decomposed ones inside
    foldable: Mapping[int, int]  # for every batch normalisation that can be folded, the node that takes it in
    selector: RankSelector
    statistics: Statistics | None
    tuned: Tuned | None  # scales, shifts and biases of their own that sizes have
    lacks_statistics: bool  # whether batch normalisation has those of the full network at every size
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    lengths: Mapping[str, int]  # of the axes that vary besides the batch, in the example input
    info: Mapping[str, Any]  # what the network's file said besides, such as measured accuracies


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """The content of a file of `export_any_size`; raises `ArtifactError` for anything else."""
    try:
        return _parse(Path(path), unseal(path))
    except (Damaged, RecursionError) as error:
        raise ArtifactError.of(path, one_line(error)) from error


def _parse(path: Path, found: Unsealed) -> Bundle:
    top, model = Fields(found.description, "the description"), found.model
    require(top.text("kind") == "any-size", f"it holds {top.text('kind')!r:.40}, not an any-size network")
    weights = dict(found.weights)
    layers = tuple(_read_weights(read_layer(record), record, weights) for record in top.record_list("layers"))
    tensors = {name: in_memory(array) for name, array in weights.items()}  # every size has them
    names = [layer.name for layer in layers]
    require(bool(layers) and len(set(names)) == len(names), "there is no layer, or one is there twice")
    wiring = Wiring(model.graph)
    recurrences = find_recurrences(wiring)
    selector, statistics, tuned = _read_sizes(top, layers, tensors, found.arrays)
    shapes = {name: array.shape for name, array in found.weights.items()}
    values = top.mapping("values") if top.has("values") else {}
    inputs = tuple(_port(value, values.get(value.name)) for value in model.graph.input)
    outputs = tuple(_port(value, None) for value in model.graph.output)
    require(bool(inputs) and bool(outputs), "it has no input or no output")
    for found_one in recurrences:
        check_shapes(found_one.recurrence, shapes)
    made = {*wiring.makers, *(port.name for port in inputs)}
    require(not shapes.keys() & made, "a weight is an input, or a node makes it")
    lengths = _read_lengths(top)
    return Bundle(
        path=path,
        model=model,
        wiring=wiring,
        tensors=tensors,
        layers=layers,
        uses={layer.name: _uses(wiring, layer, recurrences) for layer in layers},
        recurrences=recurrences,
        foldable=find_foldable(wiring, shapes),
        selector=selector,
        statistics=statistics,
        tuned=tuned,
        lacks_statistics=top.has("lacks_statistics") and top.flag("lacks_statistics"),
        inputs=inputs,
        outputs=outputs,
        lengths=lengths,
        info=top.mapping("info"),
    )


def _read_sizes(
    top: Fields, layers: Sequence[LayerWeights], tensors: Mapping[str, Array], found: Mapping[str, Array | Stored]
) -> tuple[RankSelector, Statistics | None, Tuned | None]:
    """What a choice of size depends on, and what is known of sizes, of which rows are read when one is set."""
    arrays = Arrays(found, lambda _, array: in_memory(array), "array")
    selector = read_selector(
        top, layers, np.array([rank for layer in layers for rank in layer.stored], np.int64), arrays, BUNDLE
    )
    selector.prepare()
    shapes = {name: array.shape for name, array in tensors.items()}
    statistics = read_statistics(top, selector, shapes, arrays, BUNDLE, Statistics)
    tuned = read_tuned(top, selector, shapes, arrays, Tuned)
    arrays.require_all_taken()
    if statistics is not None:
        statistics = replace(statistics, original=tuple(map(in_memory, statistics.original)))
    if tuned is not None:
        tuned = replace(tuned, original=tuple(map(in_memory, tuned.original)))
        rows = (tuned.values_ST[i] for i in range(len(tuned.plans)))  # one at a time
        check_tuned(all(bool(np.isfinite(row).all()) for row in (*tuned.original, *rows)))
        kinds = {tensors[name].dtype.kind for name in tuned.names}
        require(kinds == {"f"}, "a tuned vector is not of numbers with a fraction")
    return selector, statistics, tuned


def _read_lengths(top: Fields) -> dict[str, int]:
    """The lengths of axes in the example input; older files, and those in which only the batch varies, have none."""
    if not top.has("lengths"):
        return {}
    record = Fields(top.get("lengths"), "lengths")
    return {name: record.integer(name, 1, _MOST_INPUTS) for name in top.mapping("lengths")}


def _read_weights(layer: LayerShape, record: Fields, tensors: dict[str, Array | Stored]) -> LayerWeights:
    """A layer with its factors, which are taken from the tensors."""
    if record.has("stored"):  # only training uses it: it counts, but its weights are not there
        stored, chain = record.get("stored"), layer.chain
        require(is_rank(stored, chain.full_ranks), f"'stored' of {record.where} is {stored!r:.60}, not a rank")
        claimed = chain.shapes(stored if isinstance(stored, list) else (stored,))
        zeros = chain.held([np.broadcast_to(np.float32(0), size) for size in claimed])
        return LayerWeights(**vars(layer), weights=zeros, is_used=False)
    names = factor_names(layer.name, len(layer.stages))
    for name in names:
        require(name in tensors, f"tensor '{name:.80}' is missing")
    weights = tuple(tensors.pop(name) for name in names)
    check_held(layer, weights)
    return LayerWeights(**vars(layer), weights=weights)


def _uses(wiring: Wiring, layer: LayerWeights, recurrences: Sequence[Found]) -> tuple[Use, ...]:
    """Where the main graph has a layer; inside of recurrent ones, all its stages have to be there in a row."""
    uses = find_uses(wiring, layer.name, len(layer.stages), [found.scan for found in recurrences])
    chains = [chain for found in recurrences for chain in (found.recurrence.hh, found.recurrence.hr)]
    inside = [chain for chain in chains if set(chain) & set(layer.names)]
    require(all(chain == layer.names for chain in inside), f"layer '{layer.name:.60}': its parts do not match")
    require(
        (bool(uses) or bool(inside)) == layer.is_used,
        f"layer '{layer.name:.60}': its weights are not where they should be",
    )
    is_convolution = len(layer.shape) > 2
    for use in uses:
        for index, weight, is_swapped in zip(use.nodes, layer.weights, layer.chain.swapped, strict=True):
            node = wiring.nodes[index]
            kinds = ("ConvTranspose",) if is_swapped else ("Conv",) if is_convolution else ("Gemm", "MatMul")
            require(node.op_type in kinds, f"layer '{layer.name:.60}' of shape {layer.shape} is a {node.op_type:.40}")
            if is_convolution:
                check_geometry(node, weight.shape[2:], layer.name)
    return uses


def _port(value: onnx.ValueInfoProto, values: Any) -> Port:
    """An input or output of the graph, and the whole numbers that an input may be given, where the file says it."""
    kind = value.type.tensor_type
    dtype = type_name(kind.elem_type) if value.type.HasField("tensor_type") else None
    require(dtype is not None and kind.HasField("shape"), f"'{value.name:.60}' is no array of a known type")
    assert dtype is not None
    shape: list[int | str] = []
    for dim in kind.shape.dim:
        require(dim.dim_value >= 0, f"'{value.name:.60}' has a negative extent")
        shape.append(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?")
    known = math.prod(size for size in shape if isinstance(size, int))
    require(known <= _MOST_INPUTS, f"'{value.name:.60}' has the shape {shape!s:.80}")
    port = Port(name=value.name, shape=tuple(shape), dtype=dtype)
    if values is None:
        return port
    is_pair = isinstance(values, list) and len(values) == 2 and all(type(v) is int and abs(v) < MOST for v in values)
    require(is_pair and values[0] <= values[1], f"the values of '{value.name:.60}' are {values!r:.60}")
    return replace(port, values=tuple(values))
