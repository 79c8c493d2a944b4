"""What a file holds, and how: what is known of a network's modules without their code, and how all is described.

Where a number follows from another one (a full rank from a shape, a rank from a tensor), only one of them is stored.
`parsing.py` reads it all back.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decomposable.core.factors import Factors
from decomposable.core.layers import Layer
from decomposable.core.tracing import shape_of
from decomposable.core.unpacked import names_of_opened
from decomposable.models.origin import noted
from decomposable.network.calls import describe_call
from decomposable.network.file.container import DTYPE_NAMES, FilePath, as_json, write_container
from decomposable.network.parts import NetworkState
from decomposable_edge.device_graph import GRAPH
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.cost import LayerShape
from decomposable_edge.sizing.interpolation import choose_calibrated, with_warning
from decomposable_edge.sizing.plans import RankPlan, SizeRequest
from decomposable_edge.sizing.ranks import Measure
from decomposable_edge.sizing.record import describe, factor_names, layer_entry, state_name
from decomposable_edge.sizing.rounding import Align


@dataclass(frozen=True, kw_only=True)
class StoredLayer(LayerShape):
    """One decomposed weight, and all the places of the module tree where a layer with this weight is."""

    paths: tuple[str, ...]

    @property
    def key(self) -> str:
        """Return the weight's name in the state dict."""
        return join(self.name, "weight")


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """What is known of the modules without the model's code.

    Attributes:
        trainable: for every parameter whether it is to be trained; what the state holds besides are buffers.
        training: whether the network was in training mode; the modules of `other_mode` were in the other one.
        dtypes: of the buffers that are not stored, because the model makes them itself.
        opened: modules that are layers inside, as `core/unpacking` says it.
        built_by: which of `decomposable.models` built it and from what arguments, where that is known.
    """

    layers: tuple[StoredLayer, ...]
    trainable: Mapping[str, bool]
    training: bool
    other_mode: tuple[str, ...]
    dtypes: Mapping[str, torch.dtype]
    opened: tuple[str, ...] = ()
    built_by: Mapping[str, Any] | None = None


class TensorSlot(NamedTuple):
    """A place in the module tree that holds a parameter or a buffer."""

    module: nn.Module
    name: str
    is_parameter: bool

    @property
    def tensor(self) -> Tensor:
        """Return the tensor that it holds."""
        tensor = (self.module._parameters if self.is_parameter else self.module._buffers)[self.name]
        assert tensor is not None
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Give the tensor there another content; it stays the same object, because modules may refer to it elsewhere
        (an LSTM does), unless its kind of memory forbids that.
        """
        if torch._has_compatible_shallow_copy_type(self.tensor, tensor):
            self.tensor.data = tensor
        else:
            new = nn.Parameter(tensor, requires_grad=False) if self.is_parameter else tensor
            setattr(self.module, self.name, new)


def slots_of(model: nn.Module, *, persistent: bool) -> dict[str, TensorSlot]:
    """Return the places of all parameters and persistent buffers by name, or of the other buffers."""
    return {
        join(path, name): TensorSlot(module, name, held is module._parameters)
        for path, module in model.named_modules(remove_duplicate=False)
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and persistent == (name not in module._non_persistent_buffers_set)
    }


def skeleton_of(base: nn.Module, layers: Sequence[Layer], trainable: Mapping[str, bool]) -> Skeleton:
    """Return the skeleton of a model."""
    modules = list(base.named_modules(remove_duplicate=False))
    paths = {layer.name: tuple(path for path, module in modules if module in layer.modules) for layer in layers}
    return Skeleton(
        layers=tuple(StoredLayer(**vars(shape_of(layer)), paths=paths[layer.name]) for layer in layers),
        trainable=trainable,
        training=base.training,
        other_mode=tuple(name for name, module in base.named_modules() if module.training != base.training),
        dtypes={key: slot.tensor.dtype for key, slot in slots_of(base, persistent=False).items()},
        opened=names_of_opened(base),
        built_by=noted(base),
    )


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and persistent buffers by name; refuse a model whose state is more than these."""
    state = model.state_dict(keep_vars=True)
    own = {key: slot.tensor for key, slot in slots_of(model, persistent=True).items()}
    for key in [*state, *own]:
        if state.get(key) is not own.get(key):
            why = f"its state dict has '{key}', which is not simply a parameter or buffer (extra state, or a hook)"
            allowed = "models whose state is their parameters and buffers"
            raise InvalidArgumentError.about("model", key, allowed, why=why)
    for key, tensor in own.items():
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES.values() or tensor.is_meta:
            kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            allowed = "plain tensors of a usual type"
            raise InvalidArgumentError.about("model", key, allowed, why=f"'{key}' is {kind}")
    plain: dict[int, Tensor] = {}  # what is one tensor stays one
    return {key: plain.setdefault(id(tensor), tensor.detach()) for key, tensor in own.items()}


def join(path: str, name: str) -> str:
    """Return a name inside a module that may be the root."""
    return f"{path}.{name}" if path else name


def chain_around(key: str, paths: Container[str]) -> str | None:
    """Return the module, of these, that holds the tensor of that name; None if none does.

    >>> chain_around("block.conv.weight", {"block.conv"}), chain_around("block.norm.weight", {"block.conv"})
    ('block.conv', None)
    """
    parts = key.split(".")
    return next((path for path in (".".join(parts[:i]) for i in range(len(parts))) if path in paths), None)


def name_in_size(key: str, chains: Mapping[str, int]) -> str | None:
    """Return the name that a tensor of the original has where modules are chains of so many layers; None for what is
    replaced.

    >>> chains = {"conv": 2}
    >>> name_in_size("conv.bias", chains), name_in_size("conv.weight", chains), name_in_size("fc.bias", chains)
    ('conv.1.bias', None, 'fc.bias')
    """
    path = chain_around(key, chains)
    if path is None:
        return key
    return join(path, f"{chains[path] - 1}.bias") if key == join(path, "bias") else None


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
