"""A network as a device has it: what the file holds, every claim checked, and its weights where they lie."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from decomposable_edge.device_graph import DeviceGraph, take_graph
from decomposable_edge.fields import Fields, require
from decomposable_edge.file.container import Array, Container, InNumpy, Stored, naming
from decomposable_edge.graph import Use, Wiring, attribute, check_geometry, find_foldable, find_uses
from decomposable_edge.locks import ForkLock
from decomposable_edge.onnx_model import is_recurrence, parse_model, type_name
from decomposable_edge.recurrent import Recurrence
from decomposable_edge.sizing import record
from decomposable_edge.sizing.chain import Ranks
from decomposable_edge.sizing.cost import LayerShape
from decomposable_edge.sizing.interpolation import CalibratedSizes, KnownSizes, TunedSizes
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.record import Arrays, factor_names, state_name

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


def dense_weight(stages: Sequence[Array]) -> Array:
    """Return W̃ that the stages of a chain stand for: along every axis of the kernel, one of them has the taps."""
    own = stages[0].dtype
    exact = np.float32 if own == np.float16 else own  # numpy is slow and coarse in half precision
    made = stages[0].astype(exact, copy=False)
    for stage in stages[1:]:
        made = _joined(made, stage.astype(exact, copy=False))
    return np.ascontiguousarray(made, dtype=own)


def _joined(before: Array, behind: Array) -> Array:
    """Return one weight for two layers, of which one follows the other."""
    rank, inputs, *taps_before = before.shape
    outputs, _, *taps_behind = behind.shape
    left = np.moveaxis(behind, 1, -1).reshape(-1, rank)
    apart = (left @ before.reshape(rank, -1)).reshape(outputs, *taps_behind, inputs, *taps_before)
    axes = len(taps_before)
    pairs = [axis for i in range(axes) for axis in (1 + i, 2 + axes + i)]  # one of each two is 1 wide
    kernel = [one * other for one, other in zip(taps_before, taps_behind, strict=True)]
    return apart.transpose(0, 1 + axes, *pairs).reshape(outputs, inputs, *kernel)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights(LayerShape):
    """The weight and the factors of one layer, which lie in the file: `realising.Bases` in numpy.

    Those of the largest size that was taken are in memory, and so is the dense weight once it was taken.
    """

    stages_stored: tuple[Stored[Array], ...]  # bases first
    dense_stored: Stored[Array]
    is_used: bool = True  # a layer that only training uses is not in the graph
    _read: list[tuple[Array, ...]] = field(default_factory=list)
    _dense: list[Array] = field(default_factory=list)
    _lock: ForkLock = field(default_factory=ForkLock)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its stages in the graph."""
        return factor_names(self)

    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the stages with all bases, as their layers hold them, by name."""
        found = zip(self.names, self.chain.shapes(self.kept), self.chain.swapped, strict=True)
        return {name: (shape[1], shape[0], *shape[2:]) if is_swapped else shape for name, shape, is_swapped in found}

    @property
    def kept(self) -> Ranks:
        """Return how many bases of every cut there are."""
        return tuple(map(len, self.stages_stored[:-1]))

    def weight(self) -> Array:
        """Return the dense weight, as the layer holds it."""
        with self._lock:
            if not self._dense:
                self._dense.append(self.dense_stored.all())
            return self._dense[0]

    def first(self, ranks: Ranks) -> tuple[Array, ...]:
        """Return the first bases, as views of those that are in memory; more are read where these are too few."""
        with self._lock:
            known = tuple(map(len, self._read[0][:-1])) if self._read else (0,) * len(ranks)
            if any(wanted > there for wanted, there in zip(ranks, known, strict=True)):
                self._read.clear()  # before the larger ones are read
                self._read.append(self._from_file(tuple(map(max, ranks, known))))
            return _sliced(self._read[0], ranks)

    def beyond(self, rank: int) -> tuple[Array, ...]:
        """Return the two stages with all bases but so many."""
        first, second = self.stages_stored
        return first[rank:], second[rank:].swapaxes(0, 1)

    def joined(self, factors: tuple[Array, ...]) -> Array:
        """Return the dense weight that stages stand for, as the layer holds it."""
        return np.ascontiguousarray(self.chain.held_dense(dense_weight(factors)))

    def held(self, factors: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return the weights of stages as their layers hold them."""
        return self.chain.held(factors)

    def _from_file(self, ranks: Ranks) -> tuple[Array, ...]:
        """Return so many bases, each stage in the order of memory in which its layer holds it."""
        rows = [stored[:rank] for stored, rank in zip(self.stages_stored, (*ranks, ranks[-1]), strict=True)]
        parts = _sliced((*rows[:-1], rows[-1].swapaxes(0, 1)), ranks)
        held = [np.ascontiguousarray(part) for part in self.held(parts)]
        for each in held:
            each.flags.writeable = False
        return self.chain.held(held)


def _sliced(weights: Sequence[Array], ranks: Ranks) -> tuple[Array, ...]:
    """Return the first bases of every cut: outputs of the stage before it, and inputs of the one behind."""
    ends = (None, *ranks, None)
    return tuple(weight[: ends[i + 1], : ends[i]] for i, weight in enumerate(weights))


class _ArraysOfSizes(KnownSizes):
    """What is known of sizes, as arrays: of each table, which lies in the file, two rows are needed at a time."""

    def _mixed(self, low: Array, high: Array, place_C: Array) -> Sequence[Array]:
        values_C = low + (high.astype(np.float64) - low) * place_C
        return np.split(values_C.astype(low.dtype), np.cumsum(self.channels)[:-1])


class Statistics(_ArraysOfSizes, CalibratedSizes):
    """Mean and variance of all batch normalisation channels for calibrated sizes."""


class Tuned(_ArraysOfSizes, TunedSizes):
    """Scales, shifts and biases of tuned sizes, by the names of their tensors."""


class StoredNetwork:
    """A network at every size. The file stays open as long as this is there."""

    def __init__(self, container: Container[Array]) -> None:
        top, arrays = Fields(container.description, "the file"), Arrays(container.tensors, Stored.all, "tensor")
        kind = top.get("kind")
        require(kind == "network", f"it holds {kind!r:.40}, not a network at every size; allowed: a file of net.save()")
        require(top.get("onnx") is not None, _NO_GRAPH)
        graph = DeviceGraph.read(top.get("onnx"), take_graph(arrays).all().tobytes())
        self.path, self.info = container.path, top.mapping("info")
        self.model, constants = parse_model(graph.content)  # without its weights
        self.wiring = wiring = Wiring(self.model.graph)
        entries = top.records("state")  # a tensor that is another one is not there again
        state = {key: arrays.take(state_name(key)) for key, entry in entries.items() if not entry.has("same_as")}
        self.layers = tuple(
            _read_layer(record.read_layer(each), state, wiring, arrays) for each in top.record_list("layers")
        )
        is_right = 0 < len(self.layers) == len({layer.name for layer in self.layers})
        require(is_right, "there is no layer, or one is there twice")
        self.selector, self.statistics, self.tuned = _read_sizes(top, self.layers, state, arrays)
        #: whether batch normalisation has the statistics of the full network at every size
        self.lacks_statistics = self.statistics is None and any(key.endswith("running_mean") for key in state)
        self.lengths = graph.lengths  # of the axes that vary besides the batch, in the example input
        self.inputs = tuple(_port(value, graph.values.get(value.name, (0, 1))) for value in self.model.graph.input)
        self.outputs = tuple(_port(value) for value in self.model.graph.output)
        require(bool(self.inputs) and bool(self.outputs), "it has no input or no output")
        weights = {name: stored for key, stored in state.items() if wiring.takers(name := state_name(key))}
        shapes = {name: tuple(each.shape) for name, each in (constants | weights).items()}
        factors = {name: shape for layer in self.layers for name, shape in layer.held_shapes().items()}
        made = {*wiring.makers, *(port.name for port in self.inputs)}
        require(not (shapes.keys() | factors.keys()) & made, "a weight is an input, or a node makes it")
        require(not constants.keys() & (weights.keys() | factors.keys()), "a constant is called as a weight is")
        #: recurrent layers, by node, which may use decomposed ones inside
        self.recurrences = {i: Recurrence.of(node) for i, node in enumerate(wiring.nodes) if is_recurrence(node)}
        for one in self.recurrences.values():
            one.check(shapes | factors)
        #: where the graph has each layer; nowhere if only training uses it
        self.uses = {layer.name: _uses(wiring, layer, self.recurrences) for layer in self.layers}
        self.foldable = find_foldable(wiring, shapes | factors)
        changing = set(map(state_name, self.tuned.names if self.tuned else ()))
        #: what nodes take at every size, and the nodes that are not needed, as what they make is among it
        self.tensors, self.computed = _transposed(wiring, weights, changing)
        self.tensors |= constants


def open_network(path: str | os.PathLike[str]) -> StoredNetwork:
    """Return the network of a file of `net.save`; raise `ArtifactError` for any other file."""
    with naming(path):
        return StoredNetwork(Container(path, InNumpy()))


def _read_layer(layer: LayerShape, state: State, wiring: Wiring, arrays: Arrays) -> LayerWeights:
    names, key = factor_names(layer), f"{layer.name}.weight" if layer.name else "weight"
    stages = tuple(arrays.take(name) for name in names)
    record.check_stored(layer, stages)
    is_there = key in state and tuple(state[key].shape) == layer.chain.held_shape
    require(is_there and state[key].dtype == stages[0].dtype, f"layer '{layer.name:.60}' has no weight of its shape")
    is_used = any(wiring.takers(name) for name in names)
    return LayerWeights(**vars(layer), stages_stored=stages, dense_stored=state[key], is_used=is_used)


def _read_sizes(
    top: Fields, layers: Sequence[LayerWeights], state: State, arrays: Arrays
) -> tuple[RankSelector, Statistics | None, Tuned | None]:
    """Return what a choice of size depends on, and what is known of sizes, of which rows are read when one is set."""
    ranks = np.array([rank for layer in layers for rank in layer.kept], np.int64)
    selector = record.read_selector(top, layers, ranks, arrays)
    selector.prepare()
    shapes = {key: tuple(stored.shape) for key, stored in state.items()}
    statistics = record.read_statistics(top, selector, shapes, arrays, Statistics)
    tuned = record.read_tuned(top, selector, shapes, arrays, Tuned)
    arrays.require_all_taken()
    if statistics is not None:
        statistics = replace(statistics, original=tuple(each.all() for each in statistics.original))
    if tuned is not None:
        tuned = replace(tuned, original=tuple(each.all() for each in tuned.original))
        rows = (tuned.values_ST[i] for i in range(len(tuned.plans)))  # one at a time
        record.check_tuned(all(bool(np.isfinite(row).all()) for row in (*tuned.original, *rows)))
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
