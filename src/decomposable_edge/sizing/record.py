"""The one record of all that choosing a size needs: what a file says of it, written and read here.

A file has a description in JSON, and arrays by name. Only what follows from nothing else is stored: of a layer its
form, its shape and what it costs; its stages where the form's name does not tell them (`stages_named`). Nothing that is
read is trusted: every claim is checked, and what is wrong is `Damaged`. numpy only, for devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from decomposable_edge.fields import MOST, MOST_VALUES, Fields, require
from decomposable_edge.sizing.chain import ORDINALS, Axes, check_chain, flat_ranks, is_rank, rank_of, stages_named
from decomposable_edge.sizing.cost import LayerCost, LayerShape, LeftAlone
from decomposable_edge.sizing.interpolation import CalibratedSizes, KnownSizes, TunedSizes
from decomposable_edge.sizing.order import Numbers
from decomposable_edge.sizing.ranks import Ints, RankSelector
from decomposable_edge.text import one_line

FLOATS = ("float64", "float32", "float16", "bfloat16")  # the types that networks compute with
_MOST_BASES = 1 << 26  # bases that are gone are only claimed, and tables are made for all
_MOST_EXTENT = 1 << 31
_MOST_ALIGNMENTS = 1000
_MOST_AXES = 3  # of a kernel
_PARAMS_SCORES = "params_scores"  # of all layers, end to end; only where there are two orders


class Arrays:
    """The arrays of a file that nothing has taken yet: of numpy, of torch, or whatever else has a type and a shape.

    `load` brings the values of one into memory; `noun` is what messages call one.
    """

    def __init__(self, unused: Mapping[str, Any], load: Callable[[Any], NDArray[Any]], noun: str) -> None:
        self._unused, self._load, self._noun = dict(unused), load, noun

    def take(self, name: str) -> Any:
        """Return one, which must be there, and take it out."""
        require(name in self._unused, f"{self._noun} '{name:.80}' is missing")
        return self._unused.pop(name)

    def take_as(self, name: str, dtypes: Sequence[str], shape: tuple[int, ...]) -> Any:
        """Return one of these types and of this shape, left where it lies."""
        array = self.take(name)
        is_right = type_name(array) in dtypes and tuple(array.shape) == shape
        found = f"{type_name(array)} of shape {tuple(array.shape)}"
        require(is_right, f"{self._noun} '{name:.80}' is {found:.120}, not {' or '.join(dtypes)} of {shape}")
        return array

    def values(self, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the values of one, which has to be of this type and shape."""
        return self._load(self.take_as(name, (dtype,), shape))

    def count(self, name: str) -> int:
        """Return how many values one claims to have; none where it is not there."""
        return math.prod(self._unused[name].shape) if name in self._unused else 0

    def require_all_taken(self) -> None:
        """Refuse what belongs to nothing."""
        require(not self._unused, f"{self._noun} '{next(iter(self._unused), ''):.60}' belongs to nothing")


def type_name(array: Any) -> str:
    """Return what numpy and torch both call the type of an array's numbers, such as "float64"."""
    return str(array.dtype).removeprefix("torch.")


# Layers and their factors


def layer_entry(layer: LayerShape, cost: LayerCost | None = None) -> dict[str, Any]:
    """Return what is said of a layer; without a cost, where no size is chosen from the file."""
    entry: dict[str, Any] = {"name": layer.name, "form": layer.form, "shape": list(layer.shape)}
    if layer.stages != stages_named(layer.form, len(layer.shape) - 2):
        entry["stages"] = [list(axes) for axes in layer.stages]
    if layer.transposed:
        entry["transposed"] = True
    if cost is None:
        return entry
    each = cost.macs_per_rank
    return {**entry, "dense_macs": cost.dense_macs, "macs_per_rank": list(each) if isinstance(each, tuple) else each}


def read_layer(record: Fields) -> LayerShape:
    """Return the layer that an entry describes."""
    name, form, shape = record.text("name"), record.text("form"), tuple(record.integers("shape"))
    is_shape = 2 <= len(shape) <= 2 + _MOST_AXES and all(0 < size < _MOST_EXTENT for size in shape)
    require(is_shape, f"layer '{name:.60}' has the shape {shape!s:.80}")
    stages = _read_stages(record) if record.has("stages") else stages_named(form, len(shape) - 2) or ()
    require(len(stages) > 0, f"layer '{name:.60}' has the form {form!r:.40}")
    check_chain(name, shape, stages)
    transposed = record.has("transposed") and record.flag("transposed")
    require(not transposed or len(shape) > 2, f"layer '{name:.60}' of shape {shape} is no transposed convolution")
    return LayerShape(name=name, form=form, shape=shape, stages=stages, transposed=transposed)


def _read_stages(record: Fields) -> tuple[Axes, ...]:
    rows = record.get("stages")
    is_right = isinstance(rows, list) and len(rows) <= len(ORDINALS)
    is_right = is_right and all(isinstance(row, list) and len(row) <= _MOST_AXES for row in rows)
    is_right = is_right and all(type(flag) is bool for row in rows for flag in row)
    require(is_right, f"'stages' of {record.where} is {rows!r:.60}, not a list of flags")
    return tuple(map(tuple, rows))


def state_name(key: str) -> str:
    """Return what a tensor of the state dict is called in a file."""
    return f"state/{key}"


def factor_names(layer: LayerShape) -> tuple[str, ...]:
    """Return what the weights of a layer's stages are called there."""
    return tuple(f"{ordinal}/{layer.name}" for ordinal, _ in zip(ORDINALS, layer.stages, strict=False))


def check_held(layer: LayerShape, weights: Sequence[Any]) -> tuple[int, ...]:
    """Return how many bases each cut has; refuse weights that are not those of the stages, as its layers hold them."""
    return _check_weights(layer, weights, layer.chain.swapped)


def check_stored(layer: LayerShape, weights: Sequence[Any]) -> tuple[int, ...]:
    """Return how many bases each cut has; refuse weights that are not those of the stages, as a file has them.

    There the first bases of a cut are the first rows: those of the last stage lie along its first axis.
    """
    return _check_weights(layer, weights, [i == len(layer.stages) - 1 for i in range(len(layer.stages))])


def _check_weights(layer: LayerShape, weights: Sequence[Any], are_swapped: Sequence[bool]) -> tuple[int, ...]:
    """Check weights, of some of which the first two axes are swapped."""
    held = zip(weights, are_swapped, strict=True)
    shapes = tuple((*w.shape[1::-1], *w.shape[2:]) if is_swapped else tuple(w.shape) for w, is_swapped in held)
    ranks = tuple(shape[0] if shape else 0 for shape in shapes[:-1])
    is_right = is_rank(rank_of(ranks), layer.full_rank) and shapes == layer.chain.shapes(ranks)
    require(is_right, f"the factors of layer '{layer.name:.60}' of shape {layer.shape} have the shapes {shapes!s:.120}")
    types = [type_name(weight) for weight in weights]
    is_right = len(set(types)) == 1 and types[0] in FLOATS
    require(is_right, f"the factors of layer '{layer.name:.60}' are {' and '.join(types)}")
    return ranks


# What is written of sizes


def describe(
    selector: RankSelector,
    layer_before_norm: Mapping[str, str],
    statistics: CalibratedSizes | None,
    tuned: TunedSizes | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a description says besides its layers, and the arrays, some of them in the library of the sizes.

    `layer_before_norm` are the layers that feed normalisation layers, by the names of the latter.
    """
    left = iter(selector.scores)
    arrays: dict[str, Any] = {
        f"scores/{cost.name}": np.ascontiguousarray(np.concatenate([next(left) for _ in cost.full_ranks]))
        for cost in selector.costs
    }
    if selector.params_scores is not None:
        arrays[_PARAMS_SCORES] = np.concatenate(selector.params_scores)
    arrays |= {"limits/lower": selector.lower, "limits/upper": selector.upper}
    fields: dict[str, Any] = {
        "fixed_macs": selector.fixed_macs if selector.full_cost("macs") else None,  # no size is a part of nothing
        "fixed_params": selector.fixed_params,
        "left_alone": [asdict(part) for part in selector.left_alone],
        "layer_before_norm": dict(layer_before_norm),
        "statistics": None,
        "tuned": None,
    }
    if statistics is not None:
        fields["statistics"] = {
            "names": list(statistics.names),
            "has_explicit_full": statistics.has_explicit_full,
            "alignments": list(statistics.alignments),
            "grids": list(statistics.grids),
        }
        arrays |= _describe_known("statistics", statistics, selector, ("mean", "var"))
    if tuned is not None:
        feeders = zip(tuned.names, tuned.layer_before_norm, strict=True)
        placed = {name: feeder for name, feeder in feeders if feeder is not None}
        fields["tuned"] = {"names": list(tuned.names), "layer_before_norm": placed}
        arrays |= _describe_known("tuned", tuned, selector, ("values",))
    return fields, arrays


def _describe_known(what: str, known: KnownSizes, selector: RankSelector, tables: Sequence[str]) -> dict[str, Any]:
    """Return the arrays of known sizes, whose tables are called so in a file."""
    plans = (*known.plans, known.full_plan)  # the last row is the end of every interpolation
    arrays = {
        "ranks": np.array([flat_ranks(plan.ranks) for plan in plans], np.int64),
        "dense": np.array([[cost.name in plan.dense for cost in selector.costs] for plan in plans], bool),
        "positions": np.array(known.positions, np.float64),
    }
    arrays |= {table: getattr(known, attribute) for table, attribute in zip(tables, known.tables, strict=True)}
    arrays |= zip(_originals(tables), known.original, strict=True)
    return {f"{what}/{name}": array for name, array in arrays.items()}


def _originals(tables: Sequence[str]) -> list[str]:
    """Return what the original's rows of these tables are called in a file."""
    return ["original"] if len(tables) == 1 else [f"original_{table}" for table in tables]


# What is read of them


def read_selector(top: Fields, layers: Sequence[LayerShape], stored: Ints, arrays: Arrays) -> RankSelector:
    """Return the choice of sizes among these layers of a description, of each of whose cuts so many bases are there."""
    costs = tuple(
        LayerCost.of(layer, dense_macs=record.integer("dense_macs"), macs_per_rank=_read_macs(layer, record))
        for layer, record in zip(layers, top.record_list("layers"), strict=True)
    )
    fixed_macs = None if top.get("fixed_macs") is None else top.integer("fixed_macs")
    fixed_params = top.integer("fixed_params")
    _check_totals(costs, fixed_macs, fixed_params)
    lower, upper = (arrays.values(f"limits/{end}", "int64", (len(stored),)) for end in ("lower", "upper"))
    are_right = bool(((lower >= 1) & (lower <= upper) & (upper <= stored)).all())
    require(are_right, "the limits of the ranks are wrong")
    return RankSelector(
        costs=costs,
        scores=_read_scores(costs, [(f"scores/{cost.name}", sum(cost.full_ranks)) for cost in costs], arrays),
        params_scores=(
            _read_scores(costs, [(_PARAMS_SCORES, sum(sum(cost.full_ranks) for cost in costs))], arrays)
            if arrays.count(_PARAMS_SCORES)
            else None
        ),
        fixed_macs=fixed_macs,
        fixed_params=fixed_params,
        lower=lower,
        upper=upper,
        left_alone=tuple(
            LeftAlone(name=one_line(part.text("name"), 200), macs=part.integer("macs"), params=part.integer("params"))
            for part in top.record_list("left_alone")
        ),
        stored=stored,
    )


def _read_macs(layer: LayerShape, record: Fields) -> int | tuple[int, ...]:
    """Return what the chain costs per rank: one number, or with several cuts one for every stage."""
    if len(layer.stages) == 2:
        return record.integer("macs_per_rank")
    found = tuple(record.integers("macs_per_rank"))
    is_right = len(found) == len(layer.stages)
    require(is_right, f"'macs_per_rank' of {record.where} is {found!r:.60}, not one number for every stage")
    return found


def _check_totals(costs: Sequence[LayerCost], fixed_macs: int | None, fixed_params: int) -> None:
    """Refuse what cannot be computed with: too many bases, costs beyond 64 bits, sizes that are parts of nothing."""
    require(sum(sum(cost.full_ranks) for cost in costs) < _MOST_BASES, "the layers claim too many bases")
    macs, params = (
        sum(max(cost.dense(by), cost.chain(by, cost.full_ranks)) for cost in costs) for by in ("macs", "params")
    )
    params += fixed_params
    require(max(macs + (fixed_macs or 0), params) < MOST, "the costs are too large")
    is_free = fixed_macs is not None and fixed_macs + sum(c.dense_macs for c in costs) == 0
    require(params > 0 and not is_free, "the network has no MACs or no parameters")


def _read_scores(costs: Sequence[LayerCost], parts: Sequence[tuple[str, int]], arrays: Arrays) -> tuple[Numbers, ...]:
    """Return the scores of every cut, from these arrays of so many numbers, laid end to end."""
    names, counts = zip(*((cost.name, full) for cost in costs for full in cost.full_ranks), strict=True)
    together = np.concatenate([arrays.values(name, "float64", (count,)) for name, count in parts])
    scores = np.split(together, np.cumsum(counts)[:-1])
    for name, score in zip(names, scores, strict=True):
        in_order = bool(np.isfinite(score).all() and (np.diff(score) <= 0).all())
        require(in_order, f"the scores of layer '{name:.60}' are not in order")
    return tuple(scores)


Statistics = TypeVar("Statistics", bound=CalibratedSizes)
Tuned = TypeVar("Tuned", bound=TunedSizes)


def read_statistics(
    top: Fields,
    selector: RankSelector,
    buffers: Mapping[str, tuple[int, ...]],
    arrays: Arrays,
    kind: type[Statistics],
) -> Statistics | None:
    """Return the calibrated sizes, as that kind; `buffers` are the shapes of what the file has of the network."""
    layer_before_norm, known = top.texts_by_name("layer_before_norm"), {cost.name for cost in selector.costs}
    require(set(layer_before_norm.values()) <= known, "a normalisation layer is fed by a layer that is not there")
    if top.get("statistics") is None:
        return None
    record = Fields(top.get("statistics"), "statistics")
    names = tuple(record.texts("names"))
    channels = _read_channels(names, buffers)
    return kind(
        names=names,
        channels=channels,
        layer_before_norm=tuple(map(layer_before_norm.get, names)),
        has_explicit_full=record.flag("has_explicit_full"),
        **_read_known("statistics", "statistics", selector, arrays, sum(channels), ("mean", "var"), kind.tables),
        **_read_alignments(record),
    )


def read_tuned(
    top: Fields, selector: RankSelector, vectors: Mapping[str, tuple[int, ...]], arrays: Arrays, kind: type[Tuned]
) -> Tuned | None:
    """Return the tuned sizes, as that kind; `vectors` are the shapes of what may be tuned.

    Whoever reads the values calls `check_tuned`.
    """
    if top.get("tuned") is None:
        return None
    record = Fields(top.get("tuned"), "tuned")
    names, layer_before_norm = tuple(record.texts("names")), record.texts_by_name("layer_before_norm")
    require(0 < len(names) == len(set(names)), "tuned parameters are none, or one is there twice")
    for name in names:
        is_vector = name in vectors and len(vectors[name]) <= 1 and math.prod(vectors[name]) > 0
        require(is_vector, f"'{name:.60}' is tuned, and no vector of the network")
    known = {cost.name for cost in selector.costs}
    is_right = layer_before_norm.keys() <= set(names) and set(layer_before_norm.values()) <= known
    require(is_right, "a tuned parameter lies where a layer is that is not there")
    channels = tuple(math.prod(vectors[name]) for name in names)
    return kind(
        names=names,
        channels=channels,
        layer_before_norm=tuple(map(layer_before_norm.get, names)),
        **_read_known("tuned", "tuned values", selector, arrays, sum(channels), ("values",), kind.tables),
    )


def _read_known(
    what: str,
    noun: str,
    selector: RankSelector,
    arrays: Arrays,
    width: int,
    tables: Sequence[str],
    attributes: Sequence[str],
) -> dict[str, Any]:
    """Return the sizes that something is known of, by the attributes of `KnownSizes`.

    The tables, which are called so in a file, are left where they lie, and so are the original's rows.
    """
    count, full = len(selector.full_ranks), selector.full_ranks
    rows = arrays.count(f"{what}/ranks") // count - 1  # the last row is the end
    require(rows > 0 and (rows + 1) * count <= MOST_VALUES, f"{noun} are of {max(rows, 0):,} sizes")
    ranks = arrays.values(f"{what}/ranks", "int64", (rows + 1, count))
    dense = arrays.values(f"{what}/dense", "bool", (rows + 1, len(selector.costs)))
    require(bool(((ranks >= 1) & (ranks <= full)).all()), f"{noun} are of ranks that cannot be")
    is_full = np.logical_and.reduceat(ranks == full, selector.first_cuts, axis=1)
    require(bool((dense | ~is_full).all()), f"{noun} are of a full rank that is not dense")
    places = arrays.values(f"{what}/positions", "float64", (rows,))
    require(bool(np.isfinite(places).all() and (np.diff(places) >= 0).all()), f"{noun} are not in order")
    found = [arrays.take_as(f"{what}/{table}", FLOATS, (rows, width)) for table in tables]
    original = tuple(arrays.take_as(f"{what}/{name}", FLOATS, (width,)) for name in _originals(tables))
    require(len({type_name(each) for each in (*found, *original)}) == 1, f"{noun} are of several types")
    *plans, full_plan = (selector.plan_of(r, d) for r, d in zip(ranks, dense, strict=True))
    known = {"positions": tuple(places.tolist()), "plans": tuple(plans), "full_plan": full_plan, "original": original}
    return {**known, **dict(zip(attributes, found, strict=True))}


def check_tuned(are_finite: bool) -> None:
    """Refuse tuned values that no network can have."""
    require(are_finite, "tuned values are NaN or infinite")


def _read_channels(names: Sequence[str], buffers: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return how many channels each normalisation layer has."""
    keys = [[f"{name}.{kind}" if name else kind for kind in ("running_mean", "running_var")] for name in names]
    channels = [math.prod(buffers.get(mean, (0,))) for mean, _ in keys]
    is_right = 0 < len(names) == len(set(names)) and min(channels) > 0
    require(is_right, "statistics are empty, or of layers that cannot be")
    for name, size, pair in zip(names, channels, keys, strict=True):
        is_right = all(buffers.get(key, (size,)) == (size,) for key in pair)
        require(is_right, f"statistics of '{name:.60}' have the wrong shape")
    return tuple(channels)


def _read_alignments(record: Fields) -> dict[str, Any]:
    """Return what the ranks of calibrated sizes were rounded to, and of which of these they are a grid."""
    found, grids = record.integers("alignments"), record.integers("grids")
    is_right = 0 < len(found) <= _MOST_ALIGNMENTS and min(found) >= 1
    require(is_right, f"'alignments' of {record.where} is {found!r:.60}, not a list of multiples")
    require(set(grids) <= set(found), f"'grids' of {record.where} is {grids!r:.60}, not calibrated")
    return {"alignments": tuple(found), "grids": tuple(grids)}
