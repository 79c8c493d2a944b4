"""The layers of a model that are decomposed, those inside modules that have to be opened for it among them.

A module is opened (`unpacking/`) only where a layer inside it takes part: what nobody wants to be decomposed stays as
it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from decomposable.core.forms import FormOf
from decomposable.core.layers import REJECTED, FilterFn, Layer, avoid_fast_paths_, find_layers, in_order_of
from decomposable.core.tracing import Forward
from decomposable.core.tree import plain_name, rewire, undisturbed
from decomposable.core.unpacking import can_be_opened, kind_of, packed_weights, why_closed
from decomposable.core.unpacking.calling import Calling, Refused, calling, check_calls, may_call
from decomposable.core.unpacking.computed import forget_norms_, is_computed, settled
from decomposable.core.unpacking.parts import Copies, Make, Opened, ViewLinear

_OPENED = "_opened"  # an attribute of what stands in for a module that was opened


@dataclass(frozen=True, eq=False)
class Inside:
    """Hold the layers of a model that stays as it is, and why its other modules are left alone.

    Attributes:
        opened: what is to stand in for the modules that hold some of the layers, with views of their parameters.
        tree: the model with these in their places; the model itself where there are none.
        in_tree: the same layers as the tree has them.
    """

    layers: tuple[Layer, ...]
    skipped: dict[str, str]
    opened: Mapping[nn.Module, nn.Module]
    tree: nn.Module
    in_tree: tuple[Layer, ...]


def openable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that can be opened, by name; not those whose weights other modules hold, too."""
    holders, found = _holders(model), {}
    for full_name, module in model.named_modules():
        if can_be_opened(module) and why_closed(module) is None:
            parts = packed_weights(module)
            kinds = {type(holder) for part in parts for holder in holders.get(part.parameter, ())}
            if kinds <= {type(module), *(type(part.owner) for part in parts)}:
                found[plain_name(full_name)] = module
    return found


def replaceable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that may have others in their place in a decomposed network, by name.

    Those that can be opened, and layers whose weight is computed or that have a forward of their own; not those whose
    parameters other modules hold, too.
    """
    holders, found = _holders(model), openable(model)
    for full_name, module in model.named_modules():
        is_kind = is_computed(module) or (may_call(module) and _why_not_called(module) is None)
        if is_kind and all(holders[p] <= {*module.modules()} for p in module.parameters()):
            found[plain_name(full_name)] = module
    return found


def _holders(model: nn.Module) -> dict[nn.Parameter, set[nn.Module]]:
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter, set()).add(module)
    return holders


def _why_not_called(module: nn.Module) -> str | None:
    """Return the reason why no plain layer can make the call in a layer's own forward, or None."""
    try:
        check_calls(module)
    except Refused as why:
        return f"{type(module).__name__} has a forward of its own, {why}"
    return None


def opened(module: nn.Module, make: Make) -> nn.Module:
    """Return what takes a module's place."""
    kind = kind_of(module)
    if is_computed(module):
        made = settled(module)
    elif may_call(module):
        made = calling(module)
    else:
        made = make(*packed_weights(module)) if kind is None else kind.of(module, make)
    made.__dict__[_OPENED] = True
    return made


def with_opened(model: nn.Module, modules: Mapping[str, nn.Module], make: Make) -> nn.Module:
    """Return a copy of the tree, sharing all else, in which these modules are opened."""
    return _put_in(model, {module: opened(module, make) for module in modules.values()}) if modules else model


def _put_in(model: nn.Module, standing_in: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Return a copy of the tree, sharing all else, in which others stand in for modules; these get their hooks."""
    tree = rewire(model, standing_in)
    for module, made in standing_in.items():
        if is_computed(module):
            forget_norms_(made)
    return tree


def with_layers(module: nn.Module, opened: nn.Module, layers: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Return what takes a module's place for one step of training, around other layers."""
    return opened.with_layers(module, layers) if isinstance(opened, Opened) else layers.get(opened, opened)


def names_of_opened(base: nn.Module) -> tuple[str, ...]:
    """Return where in a tree modules are that were opened."""
    return tuple(name for name, module in base.named_modules(remove_duplicate=False) if _OPENED in module.__dict__)


def layers_inside(model: nn.Module, form: FormOf, filter_fn: FilterFn | None) -> Inside:
    """Return the layers of a model for training: their weights are its own parameters, or views of them."""
    modules = _worth_opening(model, form, filter_fn, openable(model))
    if not modules:
        layers, skipped = layers_of(model, form, filter_fn)
        return Inside(layers, skipped, {}, model, layers)
    standing_in = {module: opened(module, ViewLinear) for module in modules.values()}
    tree = rewire(model, standing_in)
    avoid_fast_paths_(tree)
    in_tree, skipped = layers_of(tree, form, filter_fn)
    own = {plain_name(name): module for name, module in model.named_modules()}
    names = {module: name for name, module in tree.named_modules()}
    layers = tuple(
        replace(layer, modules=tuple(m if isinstance(m, ViewLinear) else own[names[m]] for m in layer.modules))
        for layer in in_tree
    )
    return Inside(layers, skipped, standing_in, tree, in_tree)


def layers_of(tree: nn.Module, form: FormOf, filter_fn: FilterFn | None) -> tuple[tuple[Layer, ...], dict[str, str]]:
    """Return the layers of a tree in which all is opened that is to be, and for every other module why not."""
    layers, skipped = find_layers(tree, form, filter_fn)
    closed = openable(tree)
    for name, module in tree.named_modules():
        if can_be_opened(module) and why_closed(module) is None:
            reason = REJECTED if plain_name(name) in closed else "its weights are held by other modules"
            skipped[plain_name(name)] = reason
    return layers, in_order_of(tree, skipped)


Candidates = Callable[[nn.Module], Mapping[str, nn.Module]]
"""Which modules of a model may have others in their place, by name: `openable` for training, else `replaceable`."""


def with_layers_opened(
    base: nn.Module, form: FormOf, filter_fn: FilterFn | None, candidates: Candidates = replaceable
) -> nn.Module:
    """Return the tree with layers, copies of weights, in the place of the modules that hold some to decompose."""
    modules = _worth_opening(base, form, filter_fn, candidates(base))
    tree = with_opened(base, modules, Copies())
    if tree is not base:
        avoid_fast_paths_(tree)
    return tree


def _worth_opening(
    model: nn.Module, form: FormOf, filter_fn: FilterFn | None, modules: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    """Return those of the modules of which some layer takes part."""
    if not modules:
        return {}
    standing_in = {module: opened(module, ViewLinear) for module in modules.values()}
    layers, _ = find_layers(_put_in(model, standing_in), form, filter_fn)
    used = {module for layer in layers for module in layer.modules}
    around = {m: made.children() if isinstance(made, Opened | Calling) else () for m, made in standing_in.items()}
    return {name: module for name, module in modules.items() if used & {standing_in[module], *around[module]}}


def opened_where_it_runs(
    base: nn.Module,
    form: FormOf,
    filter_fn: FilterFn | None,
    batch: Any,
    forward: Forward,
    candidates: Candidates = replaceable,
) -> tuple[nn.Module, FilterFn | None, dict[str, str]]:
    """Return the tree with modules opened, a filter for those that are not, and the reason for each of these.

    Those stay that the model does not run without, or not with the same numbers: it may read their weights, ask for
    their class, or call them with more than their input.
    """
    tree = with_layers_opened(base, form, filter_fn, candidates)
    names = dict.fromkeys(names_of_opened(tree))
    if batch is None or not names:
        return tree, filter_fn, {}
    expected = _Expected.of(base, batch, forward)
    if expected is None or expected.failure(tree) is None:
        return tree, filter_fn, {}  # where the model itself fails, the watched pass says so

    def only(which: Callable[[str], bool]) -> FilterFn:
        return lambda module, name: which(name) and (filter_fn is None or filter_fn(module, name))

    def inside(name: str, outer: str) -> bool:
        return f"{name}.".startswith(f"{outer}.")

    found = {
        outer: expected.failure(with_layers_opened(base, form, only(partial(inside, outer=outer)), candidates))
        for outer in names
    }
    closed = {name: f"the model does not run without it: {error}" for name, error in found.items() if error}
    keep = only(lambda name: not any(inside(name, outer) for outer in closed))
    return with_layers_opened(base, form, keep, candidates), keep, closed


def refused_calls(tree: nn.Module) -> dict[str, str]:
    """Return why no plain layer has a part in the layers with a forward of their own that are left."""
    holders = replaceable(tree)
    left = {plain_name(name): module for name, module in tree.named_modules() if may_call(module)}
    otherwise = {name: REJECTED if name in holders else "its weights are held by other modules" for name in left}
    return {name: _why_not_called(module) or otherwise[name] for name, module in left.items()}


@dataclass(frozen=True, eq=False)
class _Expected:
    """Hold what the model gives for a batch, as long as nothing in it is opened."""

    outputs: list[Tensor]
    is_steady: bool  # whether it gives the same again
    batch: Any
    forward: Forward

    @classmethod
    def of(cls, model: nn.Module, batch: Any, forward: Forward) -> _Expected | None:
        """Return that of a model; None where it does not run."""
        try:
            first, second = (_tensors(_ran(model, batch, forward)) for _ in range(2))
        except Exception:  # whatever the model's code raises
            return None
        return cls(first, _are_close(first, second), batch, forward)

    def failure(self, tree: nn.Module) -> str | None:
        """Return why a pass of the tree fails, or that it gives other numbers, in one line; or None."""
        try:
            found = _tensors(_ran(tree, self.batch, self.forward))
        except Exception as error:  # whatever the model's code raises
            return " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return "it gives other numbers" if self.is_steady and not _are_close(found, self.outputs) else None


def _ran(tree: nn.Module, batch: Any, forward: Forward) -> Any:
    """Run a pass without PyTorch's fast path of transformers, which gives zeros where a mask hides a position."""
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with undisturbed(tree), torch.no_grad():
            return forward(tree, batch)
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _are_close(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Return whether they differ by rounding at most."""
    if [each.shape for each in found] != [each.shape for each in expected]:
        return False
    bounds = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
    return all(
        one.is_meta
        or not one.numel()
        or bool((one - other).abs().nan_to_num().max() <= bounds.get(one.dtype, 1e-3) * other.abs().nan_to_num().max())
        for one, other in zip(found, expected, strict=True)
    )
