"""Modules with several weights, or with a weight that lies otherwise, as plain `Linear` layers.

    nn.MultiheadAttention ─▶ q_proj, k_proj, v_proj, out_proj   nn.LSTM, GRU, RNN ─▶ ih_l0, hh_l0, …   Conv1D ─▶ Linear

Only `Linear` layers and convolutions are decomposed. A module with other weights is *opened*: another one takes its
place that computes the same with such layers, and these are then decomposed as any other. In training the layers are
views of the module's own parameters, and the module itself stays as it is; a decomposed network has copies. Layers
whose weight is computed are *settled* (`computed.py`), and of those with a forward of their own the one call in it is
made by a plain layer (`calling.py`), both for a decomposed network only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from decomposable.core.tree import plain_name, rewire
from decomposable.core.unpacking.attention import OpenedAttention
from decomposable.core.unpacking.base import Opened
from decomposable.core.unpacking.calling import Calling, Refused, calling, check_calls, has_own_forward, may_call
from decomposable.core.unpacking.computed import COMPUTED, forget_norms_, is_computed, settled
from decomposable.core.unpacking.parts import Copies, Make, PackedWeight, ViewLinear
from decomposable.core.unpacking.parts import ParameterSlice as ParameterSlice
from decomposable.core.unpacking.recurrent import OpenedRecurrent

OPENED = "_opened"  # an attribute of what stands in for a module that was opened


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether it is GPT-2's `Conv1D`, a `Linear` whose weight lies transposed; known by its name, not imported."""
    kind = type(module)
    return (
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils" and "forward" not in vars(module)
    )


def _kind_of(module: nn.Module) -> type[Opened] | None:
    if isinstance(module, nn.MultiheadAttention):
        return OpenedAttention
    return OpenedRecurrent if isinstance(module, nn.LSTM | nn.GRU | nn.RNN) else None


def can_be_opened(module: nn.Module) -> bool:
    """Whether it is of a kind that is opened, unless something is in the way."""
    return _kind_of(module) is not None or is_transposed_linear(module)


def why_closed(module: nn.Module) -> str | None:
    """The reason why a module that could be opened is not; None for what can be, and for all other modules."""
    kind = _kind_of(module)
    if kind is None:
        return None
    return kind.why_not(module) or _why_not_weights(_parts(module))


def _why_not_weights(parts: Sequence[PackedWeight]) -> str | None:
    for part in parts:
        if not isinstance(part.owner._parameters.get(part.weight), nn.Parameter):
            return f"{COMPUTED}; remove that first"
    return None


def _parts(module: nn.Module) -> list[PackedWeight]:
    kind = _kind_of(module)
    if kind is not None:
        return list(kind.parts(module).values())
    return [_part_of_transposed(module)]


def _part_of_transposed(module: nn.Module) -> PackedWeight:
    return PackedWeight(owner=module, weight="weight", bias="bias", cut=ParameterSlice(transposed=True))


def _holders(model: nn.Module) -> dict[nn.Parameter, set[nn.Module]]:
    """For every parameter the modules that hold it."""
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter, set()).add(module)
    return holders


def replaceable(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that may have others in their place in a decomposed network, by name.

    Those that can be opened, and layers whose weight is computed or that have a forward of their own; not those whose
    parameters other modules hold, too.
    """
    holders, found = _holders(model), openable(model)
    for full_name, module in model.named_modules():
        is_kind = is_computed(module) or (may_call(module) and why_not_called(module) is None)
        if is_kind and all(holders[p] <= {*module.modules()} for p in module.parameters()):
            found[plain_name(full_name)] = module
    return found


def why_not_called(module: nn.Module) -> str | None:
    """The reason why no plain layer can make the call in a layer's own forward, or None."""
    try:
        check_calls(module)
    except Refused as why:
        return f"{type(module).__name__} has a forward of its own, {why}"
    return None


def openable(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that can be opened, by name; not those whose weights other modules hold, too."""
    holders, found = _holders(model), {}
    for full_name, module in model.named_modules():
        if can_be_opened(module) and why_closed(module) is None:
            parts = _parts(module)
            kinds = {type(holder) for part in parts for holder in holders.get(part.parameter, ())}
            if kinds <= {type(module), *(type(part.owner) for part in parts)}:
                found[plain_name(full_name)] = module
    return found


def opened(module: nn.Module, make: Make) -> nn.Module:
    """What takes a module's place."""
    kind = _kind_of(module)
    if is_computed(module):
        made = settled(module)
    elif may_call(module):
        made = calling(module)
    else:
        made = make(_part_of_transposed(module)) if kind is None else kind.of(module, make)
    made.__dict__[OPENED] = True
    return made


def with_opened(model: nn.Module, modules: Mapping[str, nn.Module], make: Make) -> nn.Module:
    """A copy of the tree, sharing all else, in which these modules are opened."""
    return put_in(model, {module: opened(module, make) for module in modules.values()}) if modules else model


def put_in(model: nn.Module, standing_in: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A copy of the tree, sharing all else, in which others stand in for modules; these get the modules' hooks."""
    tree = rewire(model, standing_in)
    for module, made in standing_in.items():
        if is_computed(module):
            forget_norms_(made)
    return tree


def with_layers(module: nn.Module, opened: nn.Module, layers: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """What takes a module's place for one step of training, around other layers."""
    return opened.with_layers(module, layers) if isinstance(opened, Opened) else layers.get(opened, opened)


def names_of_opened(base: nn.Module) -> tuple[str, ...]:
    """Where in a tree modules are that were opened."""
    return tuple(name for name, module in base.named_modules(remove_duplicate=False) if OPENED in module.__dict__)


__all__ = [
    "COMPUTED",
    "Calling",
    "Copies",
    "Opened",
    "Part",
    "ViewLinear",
    "can_be_opened",
    "has_own_forward",
    "is_computed",
    "may_call",
    "names_of_opened",
    "openable",
    "opened",
    "put_in",
    "replaceable",
    "why_closed",
    "why_not_called",
    "with_layers",
    "with_opened",
]
