"""From a file of a decomposed network, or of one size of it, and the model's code to the network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decomposable.core.layers import Decomposable, Layer, TwoFactors, avoid_fast_paths_
from decomposable.core.tracing import call_with_first
from decomposable.core.tree import deep_copy, rewire, unwrap
from decomposable.errors import InvalidArgumentError, ModelNeededError
from decomposable.fields import Damaged, Fields
from decomposable.models import BUILDERS, rebuilt
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.file.container import FLOATS, open_container
from decomposable.network.file.contents import Artifact
from decomposable.network.file.parsing import Size, kind_of, naming, read_built_by, size_from
from decomposable.network.file.shrinking import read_network
from decomposable.network.file.skeleton import Skeleton, join
from decomposable.sizing.plans import SizeRequest
from decomposable.text import one_line


@dataclass(frozen=True, eq=False)
class Unbuilt:
    """A file of another maker than `decompose`: what it holds, and the model that is to be filled."""

    description: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    model: nn.Module
    is_from_file: bool  # the model was built because the file says so


def load_network(
    path: str | os.PathLike[str], model: nn.Module | None, size: SizeRequest | None
) -> nn.Module | Unbuilt:
    """The decomposed network or the plain module of a file; what else it may hold is for others to build."""
    with open_container(path) as container, naming(path):
        kind = kind_of(path, container.description)
        base, origin = _base(path, container.description, model)
        device = next((p.device for p in base.parameters() if not p.is_meta), torch.device("cpu"))
        if kind == "size":
            _refuse_size(path, size)
            content = size_from(container.description, container.read_all())
            return _plain_module(path, base, content, device, origin)
        if kind == "network":
            artifact = read_network(container, size).to(device)
            return _network(path, base, artifact, size, origin)
        _refuse_changed(path, read_built_by(Fields({"built_by": None, **container.description}, "the file")), origin)
        return Unbuilt(container.description, container.read_all(), base, origin is not None)


def _base(
    path: str | os.PathLike[str], description: Mapping[str, Any], model: nn.Module | None
) -> tuple[nn.Module, str | None]:
    """A model of its own to be filled: a copy of what was given, or what the file says; then also who built it."""
    if model is not None:
        return deep_copy(rewire(unwrap(model), {})), None
    note = read_built_by(Fields({"built_by": None, **description}, "the file"))
    if note is None:
        raise ModelNeededError(
            f"model= is needed: {path} holds weights but not the code that uses them; "
            "allowed: a model built as the one that was saved, of any weights"
        )
    if note["name"] not in BUILDERS:
        raise ModelNeededError(
            f"model= is needed: {path} says that {note['name']!r:.60} built its model, which is not one of "
            f"decomposable.models; allowed: a model built so, of any weights"
        )
    try:
        return rebuilt(note), f"{note['name']}, changed since" if note["is_changed"] else str(note["name"])
    except InvalidArgumentError as error:
        raise Damaged(str(error)) from error


def _network(
    path: str | os.PathLike[str],
    base: nn.Module,
    artifact: Artifact,
    size: SizeRequest | None,
    origin: str | None,
) -> DecomposedNet:
    """The model filled with what the file holds."""
    shapes = {key: tensor.shape for key, tensor in artifact.state.items()}
    _fit_(path, base, artifact.skeleton, artifact.state, shapes, origin)
    call = artifact.call
    forward = call_with_first if call is None or call.is_default else call.forward
    net = DecomposedNet(base=base, layers=_layers_of(base, artifact.skeleton), parts=artifact, forward=forward)
    net.latency_beside = Path(path).absolute()
    if size is not None:
        net.warn_if_not_calibrated(net.plan, stacklevel=6)  # the caller of load
    return net


def _refuse_size(path: str | os.PathLike[str], size: SizeRequest | None) -> None:
    if size is not None:
        raise InvalidArgumentError(
            f"{next(iter(size.given()))}=: {path} holds one size only; allowed: no size, or the network file it was "
            "made from"
        )


def _plain_module(
    path: str | os.PathLike[str], base: nn.Module, size: Size, device: torch.device, origin: str | None
) -> nn.Module:
    """The model with pairs in place of the layers that have become pairs."""
    moved: dict[int, Tensor] = {}  # what is one tensor stays one
    state = {key: None if t is None else moved.setdefault(id(t), t.to(device)) for key, t in size.state.items()}
    dense_shapes = {join(path, "weight"): layer.shape for layer in size.skeleton.layers for path in layer.paths}
    shapes = {key: dense_shapes.get(key) if t is None else t.shape for key, t in state.items()}
    _fit_(path, base, size.skeleton, state, shapes, origin)
    replacements: dict[nn.Module, nn.Module] = {}
    for layer, stored in zip(_layers_of(base, size.skeleton), size.skeleton.layers, strict=True):
        if layer.name in size.pairs:
            pair = size.pairs[layer.name]
            is_trainable = size.skeleton.trainable.get(stored.key, True)
            weights = [nn.Parameter(t.to(device), requires_grad=is_trainable) for t in (pair.first, pair.second)]
            for module in layer.modules:
                replacements[module] = TwoFactors(module, layer.form).build(*weights)
    network = rewire(base, replacements)
    avoid_fast_paths_(network)
    return network


class _Slot(NamedTuple):
    """A place in the module tree that holds a parameter or a buffer."""

    module: nn.Module
    name: str
    is_parameter: bool

    @property
    def tensor(self) -> Tensor:
        tensor = (self.module._parameters if self.is_parameter else self.module._buffers)[self.name]
        assert tensor is not None
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Give the tensor there another content; it stays the same object, because modules may refer to it elsewhere
        (an LSTM does), unless its kind of memory forbids that.
        """
        if torch._has_compatible_shallow_copy_type(self.tensor, tensor):
            self.tensor.data = tensor
        elif self.is_parameter:
            setattr(self.module, self.name, nn.Parameter(tensor, requires_grad=False))
        else:
            setattr(self.module, self.name, tensor)


def _slots(model: nn.Module, *, persistent: bool) -> dict[str, _Slot]:
    return {
        join(path, name): _Slot(module, name, held is module._parameters)
        for path, module in model.named_modules(remove_duplicate=False)
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and persistent == (name not in module._non_persistent_buffers_set)
    }


def _fit_(
    path: str | os.PathLike[str],
    base: nn.Module,
    skeleton: Skeleton,
    state: Mapping[str, Tensor | None],
    shapes: Mapping[str, tuple[int, ...] | None],
    origin: str | None,
) -> None:
    """Give the model the file's parameters, buffers, flags and modes, or say in what it is another model.

    `origin` is who built the model where the file said that, and not the caller gave it.
    """
    slots = _slots(base, persistent=True)
    types = {key: tensor.dtype for key, tensor in state.items() if tensor is not None}
    misfit = _misfit(slots, skeleton, shapes, types)
    if misfit is not None:
        raise _other_model(path, misfit, origin)
    _refuse_changed(path, skeleton.built_by, origin)
    first_keys: dict[int, str] = {}
    for key, tensor in state.items():
        if tensor is None:
            continue
        first = first_keys.setdefault(id(tensor), key)
        if first == key:
            slots[key].put(tensor)
        elif slots[key].tensor is not slots[first].tensor:  # one in the file, two in the model
            setattr(slots[key].module, slots[key].name, slots[first].tensor)
    for key, slot in slots.items():
        tensor = state[key]
        if tensor is not None and slot.tensor.data_ptr() != tensor.data_ptr():
            raise _other_model(path, _differs(key, "a tensor of its own", "one that it shares with another layer"))
        if slot.is_parameter:
            slot.tensor.requires_grad_(skeleton.trainable[key])
    for key, slot in _slots(base, persistent=False).items():
        if slot.tensor.is_meta:
            raise InvalidArgumentError(f"model: its buffer '{key}' is on the meta device and not in {path}")
        if key in skeleton.dtypes and skeleton.dtypes[key] != slot.tensor.dtype:
            slot.put(slot.tensor.to(skeleton.dtypes[key]))
    others = set(skeleton.other_mode)
    for name, module in base.named_modules():
        module.training = skeleton.training != (name in others)


def _misfit(
    slots: Mapping[str, _Slot],
    skeleton: Skeleton,
    shapes: Mapping[str, tuple[int, ...] | None],
    types: Mapping[str, torch.dtype],
) -> str | None:
    """The first layer, in the file's order, that the model has not or has in another shape; None if there is none."""
    for key in [*shapes, *slots]:
        in_file = in_model = "nothing"
        if key in shapes:
            in_file = _in_words(key in skeleton.trainable, shapes[key])
        if key in slots:
            tensor = slots[key].tensor
            in_model = _in_words(slots[key].is_parameter, None if nn.parameter.is_lazy(tensor) else tensor.shape)
        is_replaced = key in shapes and shapes[key] is None and key in slots  # its shape is not known any more
        if in_file != in_model and not is_replaced:
            return _differs(key, in_file, in_model)
        if key in types and _kind(types[key]) != _kind(slots[key].tensor.dtype):
            return _differs(key, f"one of {types[key]}", f"one of {slots[key].tensor.dtype}")
    for layer in skeleton.layers:
        for name in layer.paths:
            module = slots[join(name, "weight")].module
            expected = nn.Linear if len(layer.shape) == 2 else nn.Conv2d
            if not isinstance(module, expected):
                return _differs(join(name, "weight"), f"a {expected.__name__}", f"a {type(module).__name__}")
    return None


def _kind(dtype: torch.dtype) -> str:
    """What the type is for: numbers to compute with are alike, of whatever precision."""
    return "float" if dtype in FLOATS else str(dtype)


def _in_words(is_parameter: bool, shape: tuple[int, ...] | None) -> str:
    size = "no shape yet" if shape is None else f"shape {tuple(shape)}"
    return f"{'a parameter' if is_parameter else 'a buffer'} of {size}"


def _differs(key: str, in_file: str, in_model: str) -> str:
    layer, _, name = key.rpartition(".")
    return f"for '{name}' of layer '{layer}' the file has {in_file}, the model {in_model}"


def _other_model(path: str | os.PathLike[str], misfit: str, origin: str | None = None) -> InvalidArgumentError:
    """The model is not the file's: it was given so, or the file says itself who built it, which is not all."""
    reason = f"it is not the one of {path}: {misfit}"
    return InvalidArgumentError(one_line(f"model: {reason}")) if origin is None else _changed(path, origin, reason)


def _refuse_changed(path: str | os.PathLike[str], note: Mapping[str, Any] | None, origin: str | None) -> None:
    """The file says itself that its model is not any more what was built here."""
    if note is not None and origin is not None and note["is_changed"]:
        raise _changed(path, origin)


def _changed(path: str | os.PathLike[str], origin: str, reason: str | None = None) -> ModelNeededError:
    why = "" if reason is None else f": {one_line(reason)}"
    return ModelNeededError(
        f"model= is needed: {path} was built by {origin}{why}; allowed: a model as the one that was saved"
    )


def _layers_of(base: nn.Module, skeleton: Skeleton) -> tuple[Layer, ...]:
    layers = []
    for stored in skeleton.layers:
        modules = dict.fromkeys(base.get_submodule(name) for name in stored.paths)
        members: tuple[Decomposable, ...] = tuple(modules)  # type: ignore[arg-type]
        layers.append(Layer(stored.name, members, stored.form, stored.shape))
    return tuple(layers)
