"""Layers whose weight is computed from other parameters: weight norm, spectral norm, any parametrization.

    weight_g, weight_v ── g · v/‖v‖ ──▶ weight          parametrizations.weight.original ── … ──▶ weight

Such a layer is *settled* for decomposing: a plain one takes its place, with the weight that it computes in eval mode.
The layer itself is left as it was; the power iteration of a spectral norm does not go on. (PyTorch's own functions that
remove a parametrization change the class, which all copies of a module share.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from decomposable.core.tree import evaluating, hollow

COMPUTED = "its weight is computed (parametrization, weight or spectral norm)"

_ADDED = {WeightNorm: ("_g", "_v"), SpectralNorm: ("_orig", "_u", "_v")}  # to the name of what is computed


def is_computed(module: nn.Module) -> bool:
    """Return whether it is a layer whose weight, or bias, can be settled."""
    names = _computed_names(module) if isinstance(module, nn.Linear | _ConvNd) else []
    is_whole = len(set(names)) == len(names) and {"weight", "bias"}.issuperset(names)  # one rule for each
    return bool(names) and is_whole and all(name in module._parameters for name in {"weight", "bias"}.difference(names))


def _computed_names(module: nn.Module) -> list[str]:
    parametrized = list(module.parametrizations) if is_parametrized(module) else []  # type: ignore[arg-type]
    return [*parametrized, *(hook.name for hook in _norms(module))]


def _norms(module: nn.Module) -> list[Any]:
    """Return the hooks that compute a weight before every pass."""
    return [hook for hook in module._forward_pre_hooks.values() if type(hook) in _ADDED]


@torch.no_grad()
def settled(module: nn.Module) -> nn.Module:
    """Return a plain layer with the weight that the module computes in eval mode; all else is shared."""
    with evaluating(module):
        values: dict[str, Tensor] = {name: getattr(module, name) for name in ("weight", "bias")}
        for norm in _norms(module):  # what a pass left behind may be of older values
            options = {"do_power_iteration": False} if isinstance(norm, SpectralNorm) else {}
            values[norm.name] = norm.compute_weight(module, **options)
    computed = _computed_names(module)
    gone = {norm.name + end for norm in _norms(module) for end in _ADDED[type(norm)]}
    twin: nn.Module = hollow(type_before_parametrizations(module), module, without=computed)
    trained = any(p.requires_grad for p in module.parameters())
    made = {name: nn.Parameter(values[name].clone().contiguous(), requires_grad=trained) for name in computed}
    held = {name: made.get(name, module._parameters.get(name)) for name in ("weight", "bias")}
    twin._parameters = {**held, **{n: p for n, p in module._parameters.items() if n not in {*held, *gone}}}
    twin._buffers = {name: each for name, each in module._buffers.items() if name not in gone}
    twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    twin._modules = {name: each for name, each in module._modules.items() if name != "parametrizations"}
    return twin


def forget_norms_(module: nn.Module) -> None:
    """Take out hooks that would compute the weight."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if type(hook) in _ADDED:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
