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
from decomposable.network.file.container import FilePath, as_json, write_container
from decomposable.network.file.inputs import call_entries
from decomposable.network.file.skeleton import Skeleton, name_in_size
from decomposable.network.parts import NetworkState
from decomposable_edge.device_graph import GRAPH
from decomposable_edge.sizing.interpolation import NOT_CALIBRATED, choose_calibrated
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
        """The plan that a network of this takes for a budget by a measure, by default the one that is known."""
        budget: dict[str, Any] = {measure or self.selector.measure: size}
        return choose_calibrated(self.selector, self.statistics, SizeRequest(**budget, align=align))

    def calibration_warning(self, plan: RankPlan) -> str | None:
        """What to say where the statistics of this size may be far from its own; None where they are not."""
        if self.statistics is not None:
            return self.statistics.calibration_warning(plan)
        has_norms = any(key.endswith("running_mean") for key in self.state)
        return NOT_CALIBRATED if has_norms and not plan.is_full else None

    def save(self, path: FilePath, info: Mapping[str, Any] | None = None) -> int:
        """Write the file, at once or not at all, and return its size; `info`, if given, takes the place of its own."""
        artifact = self if info is None else replace(self, info=info)
        return write_container(path, *_describe_network(artifact))

    def to(self, device: torch.device) -> Artifact:
        """The same on another device."""
        moved: dict[int, Tensor] = {}  # what is one tensor stays one
        state = {key: moved.setdefault(id(t), t.to(device)) for key, t in self.state.items()}
        return replace(self.map(lambda tensor: tensor.to(device)), state=state)


def as_stored(factors: Factors) -> Factors:
    """The weights as the file has them, so that the first bases of a cut are the first rows: those of the last stage
    lie along its second axis.
    """
    return *factors[:-1], factors[-1].movedim(1, 0)


def from_stored(stored: Sequence[Tensor]) -> Factors:
    """The other way round."""
    return *stored[:-1], stored[-1].movedim(0, 1)


def _describe_network(artifact: Artifact) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a whole network."""
    layers = artifact.skeleton.layers
    state, tensors = _state_entries(artifact.state, artifact.skeleton)
    sizes, arrays = describe(artifact.selector, artifact.layer_before_norm, artifact.statistics, artifact.tuned)
    of_sizes = {name: a if isinstance(a, Tensor) else torch.from_numpy(a) for name, a in arrays.items()}
    for layer in layers:
        tensors |= zip(factor_names(layer), as_stored(artifact.factors[layer.name]), strict=True)
    tensors |= of_sizes
    if artifact.graph is not None:
        tensors[GRAPH] = torch.frombuffer(bytearray(artifact.graph.content), dtype=torch.uint8)
    entries = [layer_entry(layer, cost) for layer, cost in zip(layers, artifact.selector.costs, strict=True)]
    return {
        **_skeleton_entries("network", artifact.skeleton, state, entries, artifact.info),
        **sizes,
        "plan": [[artifact.plan.ranks[layer.name], layer.name in artifact.plan.dense] for layer in layers],
        "skipped": dict(artifact.skipped),
        "not_counted": dict(artifact.not_counted),
        **call_entries(artifact.call, artifact.unclear),
        "onnx": None if artifact.graph is None else artifact.graph.described(),
    }, tensors


def describe_size(
    artifact: Artifact, plan: RankPlan, size: Mapping[str, Tensor], info: Mapping[str, Any]
) -> dict[str, Any]:
    """The description of one size, whose tensors have the names of a plain state dict."""
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
    """What is said of every parameter and buffer, and the tensors, each of them once."""
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
        "layers": [
            {"name": layer.name, "paths": list(layer.paths), **entry}
            for layer, entry in zip(skeleton.layers, layers, strict=True)
        ],
        "opened": list(skeleton.opened),
        "training": skeleton.training,
        "other_mode": list(skeleton.other_mode),
        "dtypes": {key: str(dtype).removeprefix("torch.") for key, dtype in skeleton.dtypes.items()},
    }
