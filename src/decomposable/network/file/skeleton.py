"""What is known of a network's modules without the model's code: names, flags, and which of them are decomposed."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.forms import Form
from decomposable.core.layers import Layer
from decomposable.errors import InvalidArgumentError
from decomposable.models import noted
from decomposable.network.file.header import DTYPES
from decomposable.sizing.cost import LayerShape


@dataclass(frozen=True, kw_only=True)
class StoredLayer(LayerShape):
    """One decomposed weight, and all the places of the module tree where a layer with this weight is."""

    paths: tuple[str, ...]
    form: Form

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
        built_by: which of `decomposable.models` built it and from what arguments, where that is known.
    """

    layers: tuple[StoredLayer, ...]
    trainable: Mapping[str, bool]
    training: bool
    other_mode: tuple[str, ...]
    dtypes: Mapping[str, torch.dtype]
    built_by: Mapping[str, Any] | None = None


def skeleton_of(base: nn.Module, layers: Sequence[Layer], trainable: Mapping[str, bool]) -> Skeleton:
    """That of a model."""
    modules = list(base.named_modules(remove_duplicate=False))
    return Skeleton(
        layers=tuple(
            StoredLayer(
                name=layer.name,
                paths=tuple(path for path, module in modules if module in layer.modules),
                form=layer.form,
                shape=layer.shape,
            )
            for layer in layers
        ),
        trainable=trainable,
        training=base.training,
        other_mode=tuple(name for name, module in base.named_modules() if module.training != base.training),
        dtypes={
            join(path, name): buffer.dtype
            for path, module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and name in module._non_persistent_buffers_set
        },
        built_by=noted(base),
    )


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers by name; refuse a model whose state is more than these."""
    state = model.state_dict(keep_vars=True)
    own = {
        join(path, name): tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and name not in module._non_persistent_buffers_set
    }
    for key in [*state, *own]:
        if state.get(key) is not own.get(key):
            raise InvalidArgumentError(
                f"save: the model's state dict has '{key}', which is not simply a parameter or buffer "
                "(extra state, or a hook); allowed: models whose state is their parameters and buffers"
            )
    for key, tensor in own.items():
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPES.values() or tensor.is_meta:
            kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise InvalidArgumentError(f"save: '{key}' is {kind}; allowed: plain tensors of a usual type")
    plain: dict[int, Tensor] = {}  # what is one tensor stays one
    return {key: plain.setdefault(id(tensor), tensor.detach()) for key, tensor in own.items()}


def join(path: str, name: str) -> str:
    """A name inside a module that may be the root."""
    return f"{path}.{name}" if path else name


def pair_around(key: str, paths: Container[str]) -> str | None:
    """Which of these modules holds the tensor of that name, seen from the root; None if none does.

    >>> pair_around("block.conv.weight", {"block.conv"}), pair_around("block.norm.weight", {"block.conv"})
    ('block.conv', None)
    """
    parts = key.split(".")
    around = (".".join(parts[:i]) for i in range(len(parts)))
    return next((path for path in around if path in paths), None)


def name_in_size(key: str, pairs: Container[str]) -> str | None:
    """The name that a tensor of the original has where these modules are pairs; None for what a pair replaces.

    >>> name_in_size("conv.bias", {"conv"}), name_in_size("conv.weight", {"conv"}), name_in_size("fc.bias", {"conv"})
    ('conv.1.bias', None, 'fc.bias')
    """
    path = pair_around(key, pairs)
    if path is None:
        return key
    return join(path, "1.bias") if key == join(path, "bias") else None
