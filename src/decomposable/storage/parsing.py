"""From a file's description and tensors to what they stand for. All of it is checked, and nothing is trusted.

Whatever is wrong is raised as `Damaged`; `naming` adds the file's name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from decomposable.calibration import Statistics
from decomposable.cost import LayerCost, dense_size, factor_sizes
from decomposable.errors import ArtifactError
from decomposable.factors import Factors
from decomposable.forms import FORMS, Form, form_for, matrix_shape
from decomposable.parts import InputSpec, plan_of, stored_ranks, with_stored
from decomposable.ranks import Ints, RankPlan, RankSelector
from decomposable.storage.container import DTYPES
from decomposable.storage.contents import Artifact
from decomposable.storage.fields import MOST, Damaged, Fields, require
from decomposable.storage.skeleton import Skeleton, StoredLayer, join, name_in_size

Tensors = dict[str, Tensor]
StateTensor = TypeVar("StateTensor", Tensor, Tensor | None)
_MOST_INPUTS = 1 << 28  # numbers of one sample: nobody is made to take memory for a claim
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever is found to be damaged inside is an `ArtifactError` with the file's name."""
    try:
        yield
    except Damaged as error:
        raise ArtifactError(f"{path}: its description is damaged: {error}") from error


def kind_of(path: str | os.PathLike[str], description: dict[str, Any]) -> Literal["network", "size", "sized"]:
    """Whether the file holds a decomposed network, one size of it, or the sizes that another method makes."""
    kind = description.get("kind")
    if kind not in ("network", "size", "sized"):
        raise ArtifactError(f"{path}: holds {kind!r:.40}; allowed: a network or a size")
    return cast(Literal["network", "size", "sized"], kind)


def network_from(description: dict[str, Any], tensors: Tensors) -> Artifact:
    """The network that a description and tensors stand for; raises `Damaged` where they contradict each other."""
    top, unused = Fields(description, "the file"), dict(tensors)
    entries = top.records("state")
    state = {key: _take(unused, f"state/{key}") for key, entry in entries.items() if not entry.has("same_as")}
    state = {key: state[key] if key in state else _same(key, entry, state) for key, entry in entries.items()}
    layers, records = _read_layers(top)
    factors = {layer.name: _read_factors(layer, state, unused) for layer in layers}
    selector = _read_selector(top, layers, records, factors, unused)
    feeders = top.texts_by_name("feeders")
    artifact = Artifact(
        factors=factors,
        selector=selector,
        plan=_read_plan(top, selector, stored_ranks(factors)),
        statistics=_read_statistics(top, selector, feeders, state, unused),
        feeders=feeders,
        skipped=top.texts_by_name("skipped"),
        not_counted=top.texts_by_name("not_counted"),
        input=_read_input(top),
        info=top.mapping("info"),
        skeleton=_read_skeleton(top, layers, entries, state),
        state=state,
    )
    require(not unused, f"tensor '{next(iter(unused), '')}' belongs to nothing")
    return artifact


@dataclass(frozen=True, kw_only=True, eq=False)
class Size:
    """One size: what is as in the original by the original's names, and the pairs by the names of their layers."""

    skeleton: Skeleton
    state: Mapping[str, Tensor | None]  # None for what a pair replaces
    pairs: Mapping[str, Factors]


def size_from(description: dict[str, Any], tensors: Tensors) -> Size:
    """The size that a description and tensors stand for; raises `Damaged` where they contradict each other."""
    top, unused = Fields(description, "the file"), dict(tensors)
    layers, records = _read_layers(top)
    pairs: dict[str, Factors] = {}
    paths: set[str] = set()
    for layer, record in zip(layers, records, strict=True):
        rank = record.integer("rank", 1, _full_rank(layer))
        if record.flag("is_pair"):
            # Layers that share a weight have a copy each in the file; the first one counts.
            copies = [[_take(unused, join(path, f"{i}.weight")) for i in (0, 1)] for path in layer.paths]
            pairs[layer.name] = Factors(*copies[0])
            _check_factors(layer, pairs[layer.name], rank)
            paths.update(layer.paths)
    entries = top.records("state")
    names = {key: name_in_size(key, paths) for key in entries}
    state = {key: None if name is None else _take(unused, name) for key, name in names.items()}
    state = {key: _same(key, entry, state) if entry.has("same_as") else state[key] for key, entry in entries.items()}
    for layer in layers:
        for path in layer.paths:
            weight = state.get(join(path, "weight"), torch.empty(0))
            is_right = layer.name in pairs if weight is None else tuple(weight.shape) == layer.shape
            require(is_right, f"the weight of layer '{path}' is not there or of another shape")
    require(not unused, f"tensor '{next(iter(unused), '')}' belongs to nothing")
    return Size(skeleton=_read_skeleton(top, layers, entries, state), state=state, pairs=pairs)


def _read_input(top: Fields) -> InputSpec | None:
    if top.get("input") is None:
        return None
    record = Fields(top.get("input"), "input")
    shape, dtype = record.integers("shape"), record.text("dtype")
    require(dtype in _DTYPE_NAMES, f"'dtype' of input is {dtype!r:.60}, not a type that can be stored")
    require(0 < math.prod(shape) <= _MOST_INPUTS, f"'shape' of input is {shape!r:.60}, not that of one sample")
    return InputSpec(shape=tuple(shape), dtype=dtype)


def _same(key: str, entry: Fields, state: Mapping[str, StateTensor]) -> StateTensor:
    other = entry.text("same_as")
    require(other in state and other != key, f"'{key}' is said to be the same as '{other}', which is not there")
    return state[other]


def _take(tensors: Tensors, name: str) -> Tensor:
    require(name in tensors, f"tensor '{name}' is missing")
    return tensors.pop(name)


def _read_layers(top: Fields) -> tuple[tuple[StoredLayer, ...], list[Fields]]:
    records = top.record_list("layers")
    layers = []
    for record in records:
        shape, form = tuple(record.integers("shape")), record.text("form")
        require(len(shape) in (2, 4) and min(shape) > 0, f"{record.where} has the shape {shape}")
        require(form in FORMS and form_for(shape, cast(Form, form)) == form, f"{record.where} has the form {form!r}")
        paths = record.texts("paths")
        require(paths[:1] == [record.text("name")], f"{record.where} has the paths {paths!r:.80}")
        layers.append(StoredLayer(name=paths[0], paths=tuple(paths), form=cast(Form, form), shape=shape))
    all_paths = [path for layer in layers for path in layer.paths]
    require(bool(layers) and len(set(all_paths)) == len(all_paths), "there is no layer, or one is there twice")
    return tuple(layers), records


def _read_skeleton(
    top: Fields, layers: tuple[StoredLayer, ...], entries: Mapping[str, Fields], state: Mapping[str, Tensor | None]
) -> Skeleton:
    trainable = {key: entry.flag("trainable") for key, entry in entries.items() if entry.has("trainable")}
    for key, flag in trainable.items():
        tensor = state[key]
        require(tensor is None or tensor.is_floating_point() or not flag, f"'{key}' cannot be trained")
    dtypes = top.texts_by_name("dtypes")
    for key, name in dtypes.items():
        require(name in _DTYPE_NAMES, f"'{key}' has type {name!r:.40}")
    return Skeleton(
        layers=layers,
        trainable=trainable,
        training=top.flag("training"),
        other_mode=tuple(top.texts("other_mode")),
        dtypes={key: _DTYPE_NAMES[name] for key, name in dtypes.items()},
    )


def _read_factors(layer: StoredLayer, state: Mapping[str, Tensor], unused: Tensors) -> Factors:
    weight = state.get(layer.key)
    require(
        weight is not None and tuple(weight.shape) == layer.shape, f"layer '{layer.name}' has no weight of its shape"
    )
    for path in layer.paths:
        require(state.get(join(path, "weight")) is weight, f"layer '{path}' has not the weight of '{layer.name}'")
    first, second = _take(unused, f"first/{layer.name}"), _take(unused, f"second/{layer.name}")
    require(second.dim() == len(layer.shape), f"the second factor of layer '{layer.name}' has another shape")
    factors = Factors(first, second.movedim(0, 1))
    _check_factors(layer, factors, len(first) if first.dim() else 0)
    require(
        weight is not None and first.dtype == weight.dtype, f"the factors of layer '{layer.name}' are {first.dtype}"
    )
    return factors


def _check_factors(layer: StoredLayer, factors: Factors, rank: int) -> None:
    out_channels, in_channels, *kernel = layer.shape
    is_spatial = layer.form == "spatial"
    first = (rank, in_channels, *((1, kernel[1]) if is_spatial else kernel))
    second = (out_channels, rank, *((kernel[0], 1) if is_spatial else (1 for _ in kernel)))
    shapes = tuple(factors.first.shape), tuple(factors.second.shape)
    is_right = 1 <= rank <= _full_rank(layer) and shapes == (first, second)
    require(is_right, f"the factors of layer '{layer.name}' of shape {layer.shape} have the shapes {shapes}")
    same_type = factors.first.dtype == factors.second.dtype and factors.first.is_floating_point()
    require(same_type, f"the factors of layer '{layer.name}' are {factors.first.dtype} and {factors.second.dtype}")


def _full_rank(layer: StoredLayer) -> int:
    return min(matrix_shape(layer.shape, layer.form))


def _read_selector(
    top: Fields,
    layers: Sequence[StoredLayer],
    records: Sequence[Fields],
    factors: Mapping[str, Factors],
    unused: Tensors,
) -> RankSelector:
    costs, scores = [], []
    for layer, record in zip(layers, records, strict=True):
        cost = LayerCost(
            name=layer.name,
            full_rank=_full_rank(layer),
            dense_macs=record.integer("dense_macs"),
            macs_per_rank=record.integer("macs_per_rank"),
            dense_params=dense_size(layer.shape),
            params_per_rank=sum(factor_sizes(layer.shape, layer.form)),
        )
        score = _array(unused, f"scores/{layer.name}", torch.float64, (cost.full_rank,))
        in_order = bool(np.isfinite(score).all() and (np.diff(score) <= 0).all())
        require(in_order, f"the scores of layer '{layer.name}' are not in order")
        costs.append(cost)
        scores.append(score)
    full = np.array([cost.full_rank for cost in costs], dtype=np.int64)
    stored = stored_ranks(factors)
    lower, upper = (_array(unused, f"limits/{end}", torch.int64, full.shape) for end in ("lower", "upper"))
    require(bool(((lower >= 1) & (lower <= upper) & (upper <= stored)).all()), "the limits of the ranks are wrong")
    fixed_macs = None if top.get("fixed_macs") is None else top.integer("fixed_macs")
    fixed_params = top.integer("fixed_params")
    most = sum(max(c.dense_macs, c.full_rank * c.macs_per_rank) for c in costs) + (fixed_macs or 0)
    require(most < MOST and sum(c.full_rank * c.params_per_rank for c in costs) < MOST, "the costs are too large")
    selector = RankSelector(
        costs=tuple(costs),
        scores=tuple(scores),
        fixed_macs=fixed_macs,
        fixed_params=fixed_params,
        lower=lower,
        upper=upper,
    )
    return with_stored(selector, stored)


def _read_plan(top: Fields, selector: RankSelector, stored: Ints) -> RankPlan:
    rows = top.get("plan")
    is_list = isinstance(rows, list) and len(rows) == len(selector.costs)
    require(is_list and all(isinstance(row, list) and len(row) == 2 for row in rows), "the plan is not a list of pairs")
    for (rank, is_dense), most, cost in zip(rows, stored.tolist(), selector.costs, strict=True):
        is_right = type(rank) is int and 1 <= rank <= most and type(is_dense) is bool
        is_right = is_right and (is_dense or rank < cost.full_rank)
        require(is_right, f"the plan has rank {rank!r:.40} for layer '{cost.name}'")
    return plan_of(selector, [rank for rank, _ in rows], [is_dense for _, is_dense in rows])


def _read_statistics(
    top: Fields, selector: RankSelector, feeders: Mapping[str, str], state: Mapping[str, Tensor], unused: Tensors
) -> Statistics | None:
    layer_names = {cost.name for cost in selector.costs}
    require(set(feeders.values()) <= layer_names, "a normalisation layer is fed by a layer that is not there")
    if top.get("statistics") is None:
        return None
    record = Fields(top.get("statistics"), "statistics")
    names = tuple(record.texts("names"))
    means = [state.get(join(name, "running_mean")) for name in names]
    require(all(mean is not None and mean.dim() == 1 for mean in means), "statistics are of layers that are not there")
    channels = tuple(len(mean) for mean in means if mean is not None)
    rows = unused.get("statistics/ranks", torch.empty(0)).numel() // len(selector.costs) - 1  # the last is the end
    total = sum(channels)
    require(bool(names) and rows > 0, "statistics are empty")
    ranks = _array(unused, "statistics/ranks", torch.int64, (rows + 1, len(selector.costs)))
    dense = _array(unused, "statistics/dense", torch.bool, (rows + 1, len(selector.costs)))
    is_full = ranks == selector.full_ranks
    require(bool(((ranks >= 1) & (ranks <= selector.full_ranks)).all()), "statistics are of ranks that cannot be")
    require(bool((dense | ~is_full).all()), "statistics are of a full rank that is not dense")
    places = _array(unused, "statistics/positions", torch.float64, (rows,))
    require(bool(np.isfinite(places).all() and (np.diff(places) >= 0).all()), "statistics are not in order")
    tensors = [_take(unused, f"statistics/{name}") for name in ("mean", "var", "original_mean", "original_var")]
    for tensor, shape in zip(tensors, [(rows, total)] * 2 + [(total,)] * 2, strict=True):
        require(tuple(tensor.shape) == shape and tensor.is_floating_point(), "statistics have the wrong shape or type")
    plans = [plan_of(selector, r, d) for r, d in zip(ranks, dense, strict=True)]
    return Statistics(
        names=names,
        channels=channels,
        feeders=tuple(map(feeders.get, names)),
        positions=tuple(places.tolist()),
        plans=tuple(plans[:-1]),
        mean_SC=tensors[0],
        var_SC=tensors[1],
        has_explicit_full=record.flag("has_explicit_full"),
        full_plan=plans[-1],
        original=(tensors[2], tensors[3]),
    )


def _array(tensors: Tensors, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> np.ndarray:
    tensor = _take(tensors, name)
    is_right = tensor.dtype == dtype and tuple(tensor.shape) == shape
    require(is_right, f"tensor '{name}' is {tensor.dtype} of shape {tuple(tensor.shape)}, not {dtype} of {shape}")
    return tensor.numpy()
