"""From a file's description and tensors to what they stand for. All of it is checked, and nothing is trusted.

Whatever is wrong is raised as `Damaged`; `naming` adds the file's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from decomposable.core.factors import Factors
from decomposable.network.calibration.statistics import Statistics
from decomposable.network.calls import read_call
from decomposable.network.file.container import DTYPE_NAMES, Container, FilePath, outline_of
from decomposable.network.file.contents import Artifact, Skeleton, StoredLayer, join, name_in_size, with_last_swapped
from decomposable.network.parts import Tuned
from decomposable_edge.device_graph import DeviceGraph, take_graph
from decomposable_edge.errors import LABORATORY, ArtifactError
from decomposable_edge.fields import Corrupt, Damaged, Fields, require
from decomposable_edge.sizing.chain import Rank, Ranks, is_rank, rank_of
from decomposable_edge.sizing.plans import RankPlan
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.record import (
    Arrays,
    check_held,
    check_stored,
    factor_names,
    read_layer,
    read_selector,
    read_statistics,
    read_tuned,
    state_name,
)
from decomposable_edge.text import one_line

StateTensor = TypeVar("StateTensor", Tensor, Tensor | None)


@contextmanager
def naming(path: FilePath) -> Iterator[None]:
    """Make whatever is found to be damaged inside an `ArtifactError` with the file's name."""
    try:
        yield
    except Corrupt:
        raise  # the description is right
    except Damaged as error:
        raise ArtifactError.of(path, f"its description is damaged: {one_line(error)}") from error


def kind_of(path: FilePath, description: dict[str, Any]) -> Literal["network", "size"]:
    """Return whether the file holds a decomposed network or one size of it; refuse what else it may hold."""
    kind: Any = description.get("kind")
    if kind == "sized":
        came = f"it holds a network of the laboratory, by the method {description.get('method')!r:.40}"
        allowed = f"a decomposed network, or for this one decomposable_lab.load(path), of {LABORATORY}"
        raise ArtifactError.of(path, f"{came}; allowed: {allowed}")
    if kind not in ("network", "size"):
        raise ArtifactError.of(path, f"it holds {kind!r:.40}; allowed: a network or a size")
    return kind


def network_from(container: Container) -> Artifact:
    """Return the network that a file holds, without the content of its factors, state and statistics: on the meta
    device.

    Raises `Damaged` where the description and the tensors contradict each other.
    """
    top = Fields(container.description, "the file")
    tensors = Arrays(container.tensors, lambda stored: stored.all().numpy(), "tensor")
    layers, entries = _read_layers(top), top.records("state")
    own = [key for key, entry in entries.items() if not entry.has("same_as")]
    state = _with_shared(entries, {key: outline_of(tensors.take(state_name(key))) for key in own})
    factors, ranks = {}, list[int]()
    for layer in layers:
        factors[layer.name], kept = _read_factors(layer, state, tensors)
        ranks += kept
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    selector = read_selector(top, layers, np.array(ranks, dtype=np.int64), tensors)
    statistics = read_statistics(top, selector, shapes, tensors, Statistics)
    if statistics is not None:
        statistics = replace(statistics, original=tuple(each.all() for each in statistics.original))
    vectors = {key: shapes[key] for key, entry in entries.items() if entry.has("trainable")}
    tuned = read_tuned(top, selector, vectors, tensors, Tuned)
    if tuned is not None:
        tuned = replace(tuned, original=(tuned.original[0].all(),))
        distinct = {id(state[name]) for name in tuned.names}
        require(len(distinct) == len(tuned.names), "a parameter is tuned under two names")
    if top.get("onnx") is not None:
        DeviceGraph.read(top.get("onnx"), b"")
        take_graph(tensors)
    tensors.require_all_taken()
    return Artifact(
        factors=factors,
        selector=selector,
        plan=_read_plan(top, selector),
        statistics=statistics,
        tuned=tuned,
        layer_before_norm=top.texts_by_name("layer_before_norm"),
        skipped=top.texts_by_name("skipped"),
        not_counted=top.texts_by_name("not_counted"),
        call=read_call(top),
        unclear=top.text("unclear") if top.has("unclear") else None,
        info=top.mapping("info"),
        skeleton=_read_skeleton(top, layers, entries, state),
        state=state,
    )


def _read_plan(top: Fields, selector: RankSelector) -> RankPlan:
    rows = top.get("plan")
    is_list = isinstance(rows, list) and len(rows) == len(selector.costs)
    require(is_list and all(isinstance(row, list) and len(row) == 2 for row in rows), "the plan is not a list of pairs")
    ranks: dict[str, Rank] = {}
    for (rank, is_dense), (cost, most) in zip(rows, selector.by_layer(selector.most_ranks), strict=True):
        is_right = is_rank(rank, rank_of(most)) and type(is_dense) is bool
        ranks[cost.name] = tuple(rank) if isinstance(rank, list) else rank
        is_right = is_right and (is_dense or ranks[cost.name] != cost.full_rank)
        require(is_right, f"the plan has rank {rank!r:.40} for layer '{cost.name}'")
    return selector.plan_of(selector.as_array(ranks), np.array([is_dense for _, is_dense in rows], dtype=bool))


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredSize:
    """One size: what is as in the original by the original's names, and the chains by the names of their layers."""

    skeleton: Skeleton
    state: Mapping[str, Tensor | None]  # None for what a chain replaces
    chains: Mapping[str, Factors]


def size_from(description: dict[str, Any], tensors: dict[str, Tensor]) -> StoredSize:
    """Return the size that a description and tensors stand for; raise `Damaged` where they contradict each other."""
    top, unused = Fields(description, "the file"), Arrays(tensors, Tensor.numpy, "tensor")
    layers, entries = _read_layers(top), top.records("state")
    chains: dict[str, Factors] = {}
    lengths: dict[str, int] = {}
    for layer, record in zip(layers, top.record_list("layers"), strict=True):
        rank, count = record.get("rank"), len(layer.stages)
        require(is_rank(rank, layer.full_rank), f"layer '{layer.name:.60}' has the rank {rank!r:.40}")
        if record.flag("is_pair"):
            # Layers that share a weight have a copy each in the file; the first one counts.
            copies = [[unused.take(join(path, f"{i}.weight")) for i in range(count)] for path in layer.paths]
            found, given = check_held(layer, copies[0]), tuple(rank) if isinstance(rank, list) else (rank,)
            require(found == given, f"layer '{layer.name:.60}' has {found}")
            chains[layer.name] = layer.chain.held(copies[0])
            lengths |= dict.fromkeys(layer.paths, count)
    names = {key: name_in_size(key, lengths) for key in entries}
    state = _with_shared(entries, {k: None if name is None else unused.take(name) for k, name in names.items()})
    for layer in layers:
        for path in layer.paths:
            weight = state.get(join(path, "weight"), torch.empty(0))
            is_right = layer.name in chains if weight is None else tuple(weight.shape) == layer.chain.held_shape
            require(is_right, f"the weight of layer '{path}' is not there or of another shape")
    unused.require_all_taken()
    return StoredSize(skeleton=_read_skeleton(top, layers, entries, state), state=state, chains=chains)


def _with_shared(entries: Mapping[str, Fields], own: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
    """Return the state in its order, with one tensor for all names that are said to have the same one."""
    state: dict[str, StateTensor] = {}
    for key, entry in entries.items():
        is_shared = entry.has("same_as")
        source, known = (entry.text("same_as"), state) if is_shared else (key, own)
        require(source in known, f"'{key}' is said to be the same as '{source}', which is not there")
        state[key] = known[source]
    return state


def _read_layers(top: Fields) -> tuple[StoredLayer, ...]:
    layers = []
    for record in top.record_list("layers"):
        layer, paths = read_layer(record), record.texts("paths")
        require(paths[:1] == [layer.name], f"{record.where} has the paths {paths!r:.80}")
        layers.append(StoredLayer(**vars(layer), paths=tuple(paths)))
    all_paths = [path for layer in layers for path in layer.paths]
    require(bool(layers) and len(set(all_paths)) == len(all_paths), "there is no layer, or one is there twice")
    return tuple(layers)


def _read_skeleton(
    top: Fields, layers: tuple[StoredLayer, ...], entries: Mapping[str, Fields], state: Mapping[str, Tensor | None]
) -> Skeleton:
    trainable = {key: entry.flag("trainable") for key, entry in entries.items() if entry.has("trainable")}
    for key, flag in trainable.items():
        tensor = state[key]
        require(tensor is None or tensor.is_floating_point() or not flag, f"'{key}' cannot be trained")
    dtypes = top.texts_by_name("dtypes")
    for key, name in dtypes.items():
        require(name in DTYPE_NAMES, f"'{key}' has type {name!r:.40}")
    return Skeleton(
        layers=layers,
        trainable=trainable,
        training=top.flag("training"),
        other_mode=tuple(top.texts("other_mode")),
        dtypes={key: DTYPE_NAMES[name] for key, name in dtypes.items()},
        opened=tuple(top.texts("opened")),
        built_by=read_built_by(top),
    )


def read_built_by(top: Fields) -> dict[str, Any] | None:
    """Return what the file says of who built its model; `decomposable.models` judges it where it is used."""
    if top.get("built_by") is None:
        return None
    record = Fields(top.get("built_by"), "built_by")
    arguments, is_changed = record.mapping("arguments"), record.flag("is_changed")
    return {"name": record.text("name"), "arguments": arguments, "is_changed": is_changed}


def _read_factors(layer: StoredLayer, state: Mapping[str, Tensor], tensors: Arrays) -> tuple[Factors, Ranks]:
    """Return the factors of a layer, without content, and how many bases each cut has."""
    weight = state.get(layer.key, torch.empty(0))
    require(tuple(weight.shape) == layer.chain.held_shape, f"layer '{layer.name}' has no weight of its shape")
    for path in layer.paths:
        require(state.get(join(path, "weight")) is weight, f"layer '{path}' has not the weight of '{layer.name}'")
    stored = [tensors.take(name) for name in factor_names(layer)]
    ranks = check_stored(layer, stored)
    factors = with_last_swapped([outline_of(each) for each in stored])
    require(factors[0].dtype == weight.dtype, f"the factors of layer '{layer.name}' are {factors[0].dtype}")
    return factors, ranks
