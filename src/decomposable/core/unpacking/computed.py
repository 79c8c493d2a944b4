"""Layers whose weight is computed from other parameters: weight norm, spectral norm, any parametrization.

    weight_g, weight_v ── g · v/‖v‖ ──▶ weight          parametrizations.weight.original ── … ──▶ weight

Such a layer is *settled* for decomposing: a plain one takes its place, with the weight that it computes in eval mode.
The layer itself is left as it was; the power iteration of a spectral norm does not go on. (PyTorch's own functions that
remove a parametrization change the class, which all copies of a module share.)
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from decomposable.core.tree import evaluating

COMPUTED = "its weight is computed (parametrization, weight or spectral norm)"

_LAYERS = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_NORMS = (WeightNorm, SpectralNorm)
_ADDED = {WeightNorm: ("_g", "_v"), SpectralNorm: ("_orig", "_u", "_v")}  # to the name of what is computed


def is_computed(module: nn.Module) -> bool:
    """Whether it is a layer whose weight, or bias, can be settled."""
    if not isinstance(module, _LAYERS):
        return False
    names = _computed_names(module)
    is_whole = len(set(names)) == len(names) and set(names) <= {"weight", "bias"}  # one rule for each
    rest = {"weight", "bias"} - set(names)
    return bool(names) and is_whole and all(name in module._parameters for name in rest)


def _computed_names(module: nn.Module) -> list[str]:
    parametrized = list(module.parametrizations) if is_parametrized(module) else []  # type: ignore[arg-type]
    return [*parametrized, *(hook.name for hook in _norms(module))]


def _norms(module: nn.Module) -> list[Any]:
    """The hooks of the older kind."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _NORMS)]


@torch.no_grad()
def settled(module: nn.Module) -> nn.Module:
    """A plain layer with the weight that the module computes in eval mode; all else is shared."""
    with evaluating(module):
        values: dict[str, Tensor] = {name: getattr(module, name) for name in ("weight", "bias")}
        for norm in _norms(module):  # what a pass left behind may be of older values
            options = {"do_power_iteration": False} if isinstance(norm, SpectralNorm) else {}
            values[norm.name] = norm.compute_weight(module, **options)
    twin: nn.Module = object.__new__(type_before_parametrizations(module))
    own = {name: value.copy() for name, value in vars(module).items() if type(value) in (dict, OrderedDict, set)}
    twin.__dict__.update(vars(module), **own)
    names, gone = set(_computed_names(module)), _gone(module)
    twin.__dict__.update({name: type(held)() for name, held in own.items() if name.startswith("_forward")})
    for hooks in ("_state_dict_hooks", "_load_state_dict_pre_hooks"):
        kept = {key: hook for key, hook in own[hooks].items() if not _is_of_norm(hook)}
        twin.__dict__[hooks] = type(own[hooks])(kept)
    for name in names:
        twin.__dict__.pop(name, None)
    twin._modules = {name: each for name, each in module._modules.items() if name != "parametrizations"}
    twin._buffers = {name: each for name, each in module._buffers.items() if name not in gone}
    trained = any(p.requires_grad for p in module.parameters())
    made = {name: nn.Parameter(values[name].clone().contiguous(), requires_grad=trained) for name in names}
    held = {name: made.get(name, module._parameters.get(name)) for name in ("weight", "bias")}
    others = {name: p for name, p in module._parameters.items() if name not in {*held, *gone}}
    twin._parameters = {**held, **others}
    return twin


def _gone(module: nn.Module) -> set[str]:
    """What a hook has put in the place of the weight."""
    return {
        hook.name + end for hook in _norms(module) for kind in _NORMS if isinstance(hook, kind) for end in _ADDED[kind]
    }


def _is_of_norm(hook: Any) -> bool:
    return type(getattr(hook, "hook", hook)).__name__.startswith("SpectralNorm")


def forget_norms_(module: nn.Module) -> None:
    """Take out hooks that would compute the weight."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, _NORMS):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
