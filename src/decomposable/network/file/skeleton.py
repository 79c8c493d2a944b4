"""What is known of a network's modules without the model's code: names, flags, and which of them are decomposed."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decomposable.core.layers import Layer
from decomposable.core.tracing import shape_of
from decomposable.core.unpacked import names_of_opened
from decomposable.models.origin import noted
from decomposable.network.file.container import DTYPE_NAMES
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.cost import LayerShape


@dataclass(frozen=True, kw_only=True)
class StoredLayer(LayerShape):
    """One decomposed weight, and all the places of the module tree where a layer with this weight is."""

    paths: tuple[str, ...]

    @property
    def key(self) -> str:
        """The weight's name in the state dict."""
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
        """What it holds."""
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
    """Return that of a model."""
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
            raise InvalidArgumentError(
                f"save: the model's state dict has '{key}', which is not simply a parameter or buffer "
                "(extra state, or a hook); allowed: models whose state is their parameters and buffers"
            )
    for key, tensor in own.items():
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES.values() or tensor.is_meta:
            kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise InvalidArgumentError(f"save: '{key}' is {kind}; allowed: plain tensors of a usual type")
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
