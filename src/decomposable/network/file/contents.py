"""What a file holds, and how: the names of its tensors and its description. `parsing.py` reads it.

Where a number follows from another one (a full rank from a shape, a rank from a tensor), only one of them is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decomposable.core.factors import Factors
from decomposable.network.calls import describe_call
from decomposable.network.file.container import FilePath, as_json, write_container
from decomposable.network.file.skeleton import Skeleton, name_in_size
from decomposable.network.parts import NetworkState
from decomposable_edge.device_graph import GRAPH
from decomposable_edge.sizing.interpolation import choose_calibrated, with_warning
from decomposable_edge.sizing.plans import RankPlan, SizeRequest
from decomposable_edge.sizing.ranks import Measure
from decomposable_edge.sizing.record import describe, factor_names, layer_entry, state_name
from decomposable_edge.sizing.rounding import Align


@dataclass(frozen=True, kw_only=True, eq=False)
class Artifact(NetworkState):
    """A decomposed network without its model's code: what a file holds.

    `state` is the state dict of the network at its largest size, in order; weights that are one have one tensor.
    """

    skeleton: Skeleton
    state: Mapping[str, Tensor]

    def of_size(self, size: float, measure: Measure | None = None, align: Align | None = None) -> RankPlan:
        """Return the plan that a network of this takes for a budget by a measure, by default the one that is known."""
        budget: dict[str, Any] = {measure or self.selector.measure: size}
        return choose_calibrated(self.selector, self.statistics, SizeRequest(**budget, align=align))

    def calibration_warning(self, plan: RankPlan) -> str | None:
        """Return what to say where the statistics of this size may be far from its own; None where they are not."""
        has_norms = self.statistics is not None or any(key.endswith("running_mean") for key in self.state)
        return with_warning(plan, self.statistics, has_norms=has_norms).warning

    def save(self, path: FilePath, info: Mapping[str, Any] | None = None) -> int:
        """Write the file, at once or not at all, and return its size; `info`, if given, takes the place of its own."""
        artifact = self if info is None else replace(self, info=info)
        return write_container(path, *_describe_network(artifact))


def with_last_swapped(factors: Sequence[Tensor]) -> Factors:
    """Return weights as a file has them, or back: those of the last stage with their first two axes swapped.

    So the first bases of a cut are the first rows there.
    """
    return *factors[:-1], factors[-1].movedim(1, 0)


def _describe_network(artifact: Artifact) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and the tensors of a whole network."""
    layers, graph = artifact.skeleton.layers, artifact.graph
    state, tensors = _state_entries(artifact.state, artifact.skeleton)
    sizes, arrays = describe(artifact.selector, artifact.layer_before_norm, artifact.statistics, artifact.tuned)
    for layer in layers:
        tensors |= zip(factor_names(layer), with_last_swapped(artifact.factors[layer.name]), strict=True)
    tensors |= {name: a if isinstance(a, Tensor) else torch.from_numpy(a) for name, a in arrays.items()}
    if graph is not None:
        tensors[GRAPH] = torch.frombuffer(bytearray(graph.content), dtype=torch.uint8)
    entries = [layer_entry(layer, cost) for layer, cost in zip(layers, artifact.selector.costs, strict=True)]
    return {
        **_skeleton_entries("network", artifact.skeleton, state, entries, artifact.info),
        **sizes,
        "plan": [[artifact.plan.ranks[layer.name], layer.name in artifact.plan.dense] for layer in layers],
        "skipped": dict(artifact.skipped),
        "not_counted": dict(artifact.not_counted),
        **describe_call(artifact.call),
        **({} if artifact.unclear is None else {"unclear": artifact.unclear}),
        "onnx": None if graph is None else graph.described(),
    }, tensors


def describe_size(
    artifact: Artifact, plan: RankPlan, size: Mapping[str, Tensor], info: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the description of one size, whose tensors have the names of a plain state dict."""
    layers = artifact.skeleton.layers
    is_chain = {layer.name: plan.runs_as(layer.name) == "factors" for layer in layers}
    chains = {path: len(layer.stages) for layer in layers if is_chain[layer.name] for path in layer.paths}
    names = {key: name_in_size(key, chains) for key in artifact.state}
    state, _ = _state_entries({key: size.get(name or "") for key, name in names.items()}, artifact.skeleton)
    entries = [
        {**layer_entry(layer), "rank": plan.ranks[layer.name], "is_pair": is_chain[layer.name]} for layer in layers
    ]
    return _skeleton_entries("size", artifact.skeleton, state, entries, info)


def _state_entries(state: Mapping[str, Tensor | None], skeleton: Skeleton) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what is said of every parameter and buffer, and the tensors, each of them once."""
    entries: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    first_keys: dict[int, str] = {}
    for key, tensor in state.items():
        entry: dict[str, Any] = {"trainable": skeleton.trainable[key]} if key in skeleton.trainable else {}
        if tensor is not None and first_keys.setdefault(id(tensor), key) != key:
            entry["same_as"] = first_keys[id(tensor)]
        elif tensor is not None:
            tensors[state_name(key)] = tensor
        entries[key] = entry
    return entries, tensors


def _skeleton_entries(
    kind: str, skeleton: Skeleton, state: dict[str, Any], layers: Sequence[dict[str, Any]], info: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "kind": kind,
        "info": as_json("info", info),
        "built_by": skeleton.built_by,
        "state": state,
        "layers": [{**entry, "paths": list(layer.paths)} for layer, entry in zip(skeleton.layers, layers, strict=True)],
        "opened": list(skeleton.opened),
        "training": skeleton.training,
        "other_mode": list(skeleton.other_mode),
        "dtypes": {key: str(dtype).removeprefix("torch.") for key, dtype in skeleton.dtypes.items()},
    }
