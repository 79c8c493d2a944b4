"""What a bundle holds, read from its file. Damage is found, and the plan data is checked claim by claim.

The graph is code, as that of every ONNX model: what it computes, and how much memory that takes, is up to whoever made
the file. A bundle is to be trusted like any model (SECURITY.md).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from decomposable.edge.arrays import Array, in_memory, type_name
from decomposable.edge.container import Unsealed, unseal
from decomposable.edge.factors import LayerWeights, factor_shapes, full_rank
from decomposable.edge.graph import Use, Wiring, check_geometry, find_foldable, find_uses, first_of, second_of
from decomposable.edge.source import Stored
from decomposable.edge.statistics import Statistics
from decomposable.errors import ArtifactError
from decomposable.fields import MOST, MOST_VALUES, Damaged, Fields, require
from decomposable.sizing.cost import LayerCost, dense_size, factor_sizes
from decomposable.sizing.ranks import RankSelector
from decomposable.sizing.record import alignments_from, grids_from, left_alone_from
from decomposable.sizing.shrunk import plan_of, with_stored
from decomposable.text import one_line

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
    """A network at every size, as a device has it.

    Attributes:
        model: the ONNX model without its weights.
        wiring: which nodes take which values.
        tensors: the weights that are no factors, by name.
        uses: where the graph has each layer; nowhere if only training uses it.
        foldable: for every batch normalisation that can be folded, the node that takes it in.
        lacks_statistics: whether batch normalisation has those of the full network at every size.
        lengths: how long the axes that vary besides the batch were in the example input, by name.
        info: what the network's file said besides, such as measured accuracies.
    """

    path: Path
    model: onnx.ModelProto
    wiring: Wiring
    tensors: Mapping[str, Array]
    layers: tuple[LayerWeights, ...]
    uses: Mapping[str, tuple[Use, ...]]
    foldable: Mapping[int, int]
    selector: RankSelector
    statistics: Statistics | None
    lacks_statistics: bool
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    lengths: Mapping[str, int]
    info: Mapping[str, Any]

    @property
    def used_layers(self) -> tuple[LayerWeights, ...]:
        """The layers that the graph has."""
        return tuple(layer for layer in self.layers if layer.is_used)


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """The content of a file of `export_any_size`; raises `ArtifactError` for anything else."""
    try:
        return _parse(Path(path), unseal(path))
    except (Damaged, RecursionError) as error:
        raise ArtifactError(f"{path}: {one_line(error)}") from error


def _parse(path: Path, found: Unsealed) -> Bundle:
    top, model = Fields(found.description, "the description"), found.model
    require(top.text("kind") == "any-size", f"it holds {top.text('kind')!r:.40}, not an any-size network")
    weights = dict(found.weights)
    records = top.record_list("layers")
    layers = tuple(_read_layer(record, weights) for record in records)
    tensors = {name: in_memory(array) for name, array in weights.items()}  # every size has them
    names = [layer.name for layer in layers]
    require(bool(layers) and len(set(names)) == len(names), "there is no layer, or one is there twice")
    wiring = Wiring(model.graph)
    unused = dict(found.arrays)
    selector = _read_selector(top, layers, records, unused)
    statistics = _read_statistics(top, selector, tensors, unused)
    require(not unused, f"array '{next(iter(unused), ''):.60}' belongs to nothing")
    used = [layer for layer in layers if layer.is_used]
    factors = {name: x for y in used for name, x in ((first_of(y.name), y.first), (second_of(y.name), y.second))}
    shapes = {name: array.shape for name, array in (tensors | factors).items()}
    inputs, outputs = (tuple(_port(v) for v in values) for values in (model.graph.input, model.graph.output))
    require(bool(inputs) and bool(outputs), "it has no input or no output")
    made = {*wiring.makers, *(port.name for port in inputs)}
    require(not shapes.keys() & made, "a weight is an input, or a node makes it")
    lengths = _read_lengths(top)
    return Bundle(
        path=path,
        model=model,
        wiring=wiring,
        tensors=tensors,
        layers=layers,
        uses={layer.name: _uses(wiring, layer) for layer in layers},
        foldable=find_foldable(wiring, shapes),
        selector=selector,
        statistics=statistics,
        lacks_statistics=top.has("lacks_statistics") and top.flag("lacks_statistics"),
        inputs=tuple(_with_values(port, top) for port in inputs),
        outputs=outputs,
        lengths=lengths,
        info=top.mapping("info"),
    )


def _read_lengths(top: Fields) -> dict[str, int]:
    """The lengths of axes in the example input; older files, and those in which only the batch varies, have none."""
    if not top.has("lengths"):
        return {}
    record = Fields(top.get("lengths"), "lengths")
    return {name: record.integer(name, 1, _MOST_INPUTS) for name in top.mapping("lengths")}


def _with_values(port: Port, top: Fields) -> Port:
    found = top.mapping("values").get(port.name) if top.has("values") else None
    if found is None:
        return port
    is_right = isinstance(found, list) and len(found) == 2 and all(type(v) is int and -MOST < v < MOST for v in found)
    require(is_right and found[0] <= found[1], f"the values of '{port.name:.60}' are {found!r:.60}")
    return replace(port, values=(found[0], found[1]))


def _read_layer(record: Fields, tensors: dict[str, Array | Stored]) -> LayerWeights:
    name, form, shape = record.text("name"), record.text("form"), tuple(record.integers("shape"))
    require(len(shape) in (2, 4) and all(0 < size < 1 << 31 for size in shape), f"layer '{name:.60}' has a wrong shape")
    forms = ("channel",) if all(size == 1 for size in shape[2:]) else ("channel", "spatial")
    require(form in forms, f"layer '{name:.60}' has the form {form!r:.40}")
    if record.has("stored"):  # only training uses it: it counts, but its weights are not there
        claimed = factor_shapes(shape, form, record.integer("stored", 1, full_rank(shape, form)))
        empty = [np.broadcast_to(np.float32(0), size) for size in claimed]
        return LayerWeights(name=name, form=form, shape=shape, first=empty[0], second=empty[1], is_used=False)
    for weight in (first_of(name), second_of(name)):
        require(weight in tensors, f"tensor '{weight:.80}' is missing")
    first, second = tensors.pop(first_of(name)), tensors.pop(second_of(name))
    rank = first.shape[0] if first.ndim else 0
    is_right = 1 <= rank <= full_rank(shape, form) and (first.shape, second.shape) == factor_shapes(shape, form, rank)
    shapes = f"{first.shape} and {second.shape}"
    require(is_right, f"the factors of layer '{name:.60}' of shape {shape} have the shapes {shapes:.120}")
    same_type = first.dtype == second.dtype and first.dtype.kind == "f"
    require(same_type, f"the factors of layer '{name:.60}' are {first.dtype} and {second.dtype}")
    return LayerWeights(name=name, form=form, shape=shape, first=first, second=second)


def _uses(wiring: Wiring, layer: LayerWeights) -> tuple[Use, ...]:
    uses = find_uses(wiring, layer.name)
    require(bool(uses) == layer.is_used, f"layer '{layer.name:.60}': its weights are not where they should be")
    kinds = ("Conv",) if len(layer.shape) == 4 else ("Gemm", "MatMul")
    for use in uses:
        for index, weight in ((use.first, layer.first), (use.second, layer.second)):
            node = wiring.nodes[index]
            require(node.op_type in kinds, f"layer '{layer.name:.60}' of shape {layer.shape} is a {node.op_type:.40}")
            if node.op_type == "Conv":
                check_geometry(node, weight.shape[2:], layer.name)
    return uses


def _read_selector(
    top: Fields, layers: Sequence[LayerWeights], records: Sequence[Fields], unused: dict[str, Array | Stored]
) -> RankSelector:
    costs = tuple(
        LayerCost(
            name=layer.name,
            full_rank=full_rank(layer.shape, layer.form),
            dense_macs=record.integer("dense_macs"),
            macs_per_rank=record.integer("macs_per_rank"),
            dense_params=dense_size(layer.shape),
            params_per_rank=sum(factor_sizes(layer.shape, layer.form)),
        )
        for layer, record in zip(layers, records, strict=True)
    )
    full, stored = (np.array(v, np.int64) for v in ([c.full_rank for c in costs], [x.stored for x in layers]))
    _check_total(full)
    scores = np.split(_read(unused, "scores", "f8", (int(full.sum()),)), np.cumsum(full)[:-1])
    for layer, score in zip(layers, scores, strict=True):
        in_order = bool(np.isfinite(score).all() and (np.diff(score) <= 0).all())
        require(in_order, f"the scores of layer '{layer.name:.60}' are not in order")
    lower, upper = (_read(unused, f"limits/{end}", "i8", full.shape) for end in ("lower", "upper"))
    require(bool(((lower >= 1) & (lower <= upper) & (upper <= stored)).all()), "the limits of the ranks are wrong")
    fixed_macs = None if top.get("fixed_macs") is None else top.integer("fixed_macs")
    fixed_params = top.integer("fixed_params")
    most = sum(max(c.dense_macs, c.full_rank * c.macs_per_rank) for c in costs) + (fixed_macs or 0)
    params = sum(max(c.dense_params, c.full_rank * c.params_per_rank) for c in costs) + fixed_params
    require(max(most, params) < MOST, "the costs are too large")
    is_free = fixed_macs is not None and fixed_macs + sum(c.dense_macs for c in costs) == 0
    require(params > 0 and not is_free, "the network has no MACs or no parameters")  # sizes are parts of that
    parts: dict[str, Any] = {"costs": costs, "scores": tuple(scores), "fixed_macs": fixed_macs}
    parts |= {"fixed_params": fixed_params, "lower": lower, "upper": upper, "left_alone": left_alone_from(top)}
    selector = with_stored(RankSelector(**parts), stored)
    selector.prepare()
    return selector


def _check_total(full: NDArray[np.int64]) -> None:
    """Bases that are gone are only claimed, and tables are made for all: few enough for that."""
    require(int(full.astype(np.float64).sum()) < 1 << 26, "the layers claim too many bases")


def _read_statistics(
    top: Fields, selector: RankSelector, tensors: Mapping[str, Array], unused: dict[str, Array | Stored]
) -> Statistics | None:
    feeders, count = top.texts_by_name("feeders"), len(selector.costs)
    known = {cost.name for cost in selector.costs}
    require(set(feeders.values()) <= known, "a normalisation layer is fed by a layer that is not there")
    if top.get("statistics") is None:
        return None
    record = Fields(top.get("statistics"), "statistics")
    names, channels = tuple(record.texts("names")), tuple(record.integers("channels"))
    is_right = 0 < len(names) == len(channels) == len(set(names)) and min(channels) > 0
    require(is_right, "statistics are empty, or of layers that cannot be")
    for name, size in zip(names, channels, strict=True):
        for kind in ("running_mean", "running_var"):
            tensor = tensors.get(f"{name}.{kind}" if name else kind)
            require(tensor is None or tensor.shape == (size,), f"statistics of '{name:.60}' have the wrong shape")
    rows, total = unused.get("statistics/ranks", np.zeros(0)).size // count - 1, sum(channels)  # the last is the end
    require(rows > 0 and rows * count < MOST_VALUES, f"statistics are of {max(rows, 0):,} sizes")
    ranks = _read(unused, "statistics/ranks", "i8", (rows + 1, count))
    dense = _read(unused, "statistics/dense", "?", (rows + 1, count))
    require(bool(((ranks >= 1) & (ranks <= selector.full_ranks)).all()), "statistics are of ranks that cannot be")
    require(bool((dense | (ranks != selector.full_ranks)).all()), "statistics are of a full rank that is not dense")
    places = _read(unused, "statistics/positions", "f8", (rows,))
    require(bool(np.isfinite(places).all() and (np.diff(places) >= 0).all()), "statistics are not in order")
    plans = [plan_of(selector, r, d) for r, d in zip(ranks, dense, strict=True)]
    return Statistics(
        names=names,
        channels=channels,
        feeders=tuple(map(feeders.get, names)),
        positions=tuple(places.tolist()),
        plans=tuple(plans[:-1]),
        mean_SC=_take(unused, "statistics/mean", "f", (rows, total)),
        var_SC=_take(unused, "statistics/var", "f", (rows, total)),
        has_explicit_full=record.flag("has_explicit_full"),
        full_plan=plans[-1],
        alignments=alignments_from(record),
        grids=grids_from(record),
        original=(_read(unused, "original/mean", "f", (total,)), _read(unused, "original/var", "f", (total,))),
    )


def _read(arrays: dict[str, Array | Stored], name: str, kind: str, shape: tuple[int, ...]) -> Array:
    """The values of an array of this kind."""
    return in_memory(_take(arrays, name, kind, shape))


def _take(arrays: dict[str, Array | Stored], name: str, kind: str, shape: tuple[int, ...]) -> Array | Stored:
    """An array of this kind: a numpy type, or "f" for any with fractions."""
    require(name in arrays, f"array '{name}' is missing")
    array = arrays.pop(name)
    is_right = array.shape == shape and (array.dtype.kind == "f" if kind == "f" else array.dtype == np.dtype(kind))
    require(is_right, f"array '{name}' is {array.dtype} of shape {array.shape}, not {kind} of {shape}")
    return array


def _port(value: onnx.ValueInfoProto) -> Port:
    """An input or output of the graph."""
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
    return Port(name=value.name, shape=tuple(shape), dtype=dtype)
