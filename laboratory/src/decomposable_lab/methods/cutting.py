"""Single modules at a part of their channels: which can be cut, what a cut leaves of their tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from decomposable.core.factors import memory_format_of
from decomposable_edge.errors import UnsupportedModelError

_WITH_FIXED_CHANNELS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _InstanceNorm)  # even where they have no parameters
_ALLOWED = (
    "convolutions with groups=1 or depthwise ones, linear layers, batch normalisation, and modules without parameters"
)


class ChannelCounts(NamedTuple):
    """Hold how many channels a module gives and receives."""

    outputs: int
    inputs: int


def scalable_modules(names: Mapping[nn.Module, str]) -> tuple[nn.Module, ...]:
    """Return the modules whose channels can be cut; refuse any that has channels and is of another kind."""
    for module, name in names.items():
        reason = _why_not(module)
        if reason is not None:
            raise UnsupportedModelError(
                f"model: module '{name}' ({type(module).__name__}) {reason}, so that its channels cannot be cut; "
                f"allowed: {_ALLOWED}"
            )
    return tuple(module for module in names if _is_scalable(module))


def _is_scalable(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd | nn.Linear | _BatchNorm)


def _why_not(module: nn.Module) -> str | None:
    """Return the reason why a module stands in the way, or None."""
    if isinstance(module, _WITH_FIXED_CHANNELS):
        return "has a fixed number of channels"
    if not _is_scalable(module):
        has_channels = any(p is not None and (is_lazy(p) or p.numel() > 1) for p in module._parameters.values())
        return "has parameters of its own" if has_channels else None
    if any(p is not None and is_lazy(p) for p in module._parameters.values()):
        return "has seen no input yet"
    if is_parametrized(module) or (not isinstance(module, _BatchNorm) and module._parameters.get("weight") is None):
        return "has a weight that is computed"
    if "forward" in vars(module) or "_conv_forward" in vars(module):
        return "has a forward method that was put into it"
    known = {"weight", "bias"}
    if isinstance(module, _BatchNorm):
        known |= {"running_mean", "running_var", "num_batches_tracked"}
    if not {*module._parameters, *module._buffers} <= known:
        return "has tensors of its own"
    groups = getattr(module, "groups", 1)
    if groups > 1 and not is_depthwise(module):
        return f"has groups={groups}"
    return None


def is_depthwise(module: nn.Module) -> bool:
    """Return whether every channel is convolved for itself."""
    return isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels == module.out_channels


def outputs_of(module: nn.Module) -> int:
    """Return how many channels a layer gives at full width."""
    assert isinstance(module, _ConvNd | nn.Linear)
    return module.out_channels if isinstance(module, _ConvNd) else module.out_features


def channels_of(module: nn.Module, x: Tensor) -> int:
    """Return how many channels an input of this module has."""
    if isinstance(module, nn.Linear):
        return x.shape[-1]
    return x.shape[-1 - len(module.kernel_size)] if isinstance(module, _ConvNd) else x.shape[1]


def extents_of(module: nn.Module, cut: ChannelCounts) -> dict[str, tuple[int, ...]]:
    """Return how much of the leading axes of each tensor a module of this cut has."""
    if isinstance(module, _BatchNorm):
        return dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (cut.inputs,))
    if is_depthwise(module):
        return {"weight": (cut.outputs,), "bias": (cut.outputs,)}
    weight = (cut.inputs, cut.outputs) if getattr(module, "transposed", False) else (cut.outputs, cut.inputs)
    return {"weight": weight, "bias": (cut.outputs,)}


def size_of(tensor: Tensor, extents: tuple[int, ...]) -> int:
    """Return how many numbers are left of a tensor."""
    return math.prod((*extents, *tensor.shape[len(extents) :]))


def _attributes(module: nn.Module, cut: ChannelCounts) -> dict[str, int]:
    """Return what a module of this cut says of itself."""
    if isinstance(module, _BatchNorm):
        return {"num_features": cut.inputs}
    if isinstance(module, nn.Linear):
        return {"in_features": cut.inputs, "out_features": cut.outputs}
    groups = {"groups": cut.inputs} if is_depthwise(module) else {}
    return {"in_channels": cut.inputs, "out_channels": cut.outputs, **groups}


def shell_of(module: nn.Module) -> nn.Module:
    """Return a copy that shares all tensors. Made from its attributes: a constructor would take ten times as long."""
    shell = object.__new__(type(module))
    for name, value in vars(module).items():
        if name != "_compiled_call_impl":
            shell.__dict__[name] = value.copy() if isinstance(value, dict | set) else value
    return shell


def _parts(module: nn.Module, cut: ChannelCounts) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Return the name of every tensor, the tensor, and the view of it that a module of this cut has."""
    tensors = {**module._buffers, **module._parameters}
    for name, extents in extents_of(module, cut).items():
        tensor = tensors.get(name)
        if tensor is not None:
            part: Tensor = tensor
            for axis, extent in enumerate(extents):
                part = part.narrow(axis, 0, extent) if extent < part.shape[axis] else part
            yield name, tensor, part


def replace_by_views_(shell: nn.Module, cut: ChannelCounts) -> None:
    """Cut a module in place; views of parameters are plain attributes, through which gradients flow."""
    for name, tensor, part in list(_parts(shell, cut)):
        if part is tensor:
            continue
        if name in shell._buffers:
            shell._buffers[name] = part
        else:
            del shell._parameters[name]
            shell.__dict__[name] = part
    shell.__dict__.update(_attributes(shell, cut))


def as_views(module: nn.Module, cut: ChannelCounts) -> nn.Module:
    """Return a cut module whose tensors are views of the model's."""
    shell = shell_of(module)
    replace_by_views_(shell, cut)
    return shell


@torch.no_grad()
def as_parameters(
    module: nn.Module, cut: ChannelCounts, made: dict[nn.Parameter, nn.Parameter], is_fresh: bool
) -> nn.Module:
    """Return a cut module with parameters of its own, laid out as the model's; `made` are those made before."""
    shell = shell_of(module)
    gain = _gain(module, cut) if is_fresh else 1.0
    for name, tensor, part in _parts(module, cut):
        if not isinstance(tensor, nn.Parameter):
            shell._buffers[name] = part
            continue
        if tensor not in made:
            # A bias of one value for all channels is no random one: nothing in it follows the fan-in.
            is_constant = is_fresh and name == "bias" and bool((part == part.flatten()[0]).all())
            values = part.detach() if gain == 1 or is_constant else part.detach() * gain
            values = values.contiguous(memory_format=memory_format_of(tensor))
            made[tensor] = nn.Parameter(values, requires_grad=tensor.requires_grad)
        shell._parameters[name] = made[tensor]
    shell.__dict__.update(_attributes(module, cut))
    return shell


def _gain(module: nn.Module, cut: ChannelCounts) -> float:
    """√(full fan-in / fan-in), with the fan-in that torch's initialisations use."""
    if isinstance(module, _BatchNorm):
        return 1.0
    weight = module._parameters["weight"]
    assert weight is not None
    extents = extents_of(module, cut)["weight"]
    return math.sqrt(weight[0].numel() * extents[0] / size_of(weight, extents))
