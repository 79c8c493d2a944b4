"""The layers of a model that are decomposed, also those inside modules that are opened for it (`unpacking/`).

A module is opened only where a layer inside it takes part: what nobody wants to be decomposed stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from decomposable.core.forms import FormOf
from decomposable.core.layers import REJECTED, FilterFn, Layer, avoid_fast_paths_, find_layers, in_order_of
from decomposable.core.tracing import Forward
from decomposable.core.tree import plain_name, rewire, undisturbed
from decomposable.core.unpacking import can_be_opened, kind_of, packed_weights
from decomposable.core.unpacking.calling import calling, may_call, why_not_called
from decomposable.core.unpacking.computed import forget_norms_, is_computed, settled
from decomposable.core.unpacking.parts import Copies, Make, Opened, ViewLinear

_OPENED = "_opened"  # an attribute of what took the place of a module
_SHARED = "its weights are held by other modules"


def replaceable(model: nn.Module, *, in_training: bool = False) -> dict[str, nn.Module]:
    """Return the modules that may have others in their place, by name; not those whose weights others hold, too.

    In training those are what can be opened; in a decomposed network also layers whose weight is computed or that have
    a forward of their own.
    """
    holders: dict[nn.Parameter | None, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[parameter].add(module)
    found = {}
    for full_name, module in model.named_modules():
        is_alone = False
        if can_be_opened(module):
            parts = packed_weights(module)
            kinds = {type(holder) for part in parts for holder in holders[part.parameter]}
            is_alone = kinds <= {type(module), *(type(part.owner) for part in parts)}
        elif not in_training and (is_computed(module) or (may_call(module) and why_not_called(module) is None)):
            is_alone = all(holders[p] <= {*module.modules()} for p in module.parameters())
        if is_alone:
            found[plain_name(full_name)] = module
    return found


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


def with_opened(model: nn.Module, modules: Iterable[nn.Module]) -> nn.Module:
    """Return a copy of the tree, sharing all else, with layers that are copies in the place of these modules."""
    make = Copies()
    standing_in = {module: opened(module, make) for module in modules}
    if not standing_in:
        return model
    tree = _put_in(model, standing_in)
    avoid_fast_paths_(tree)
    return tree


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


def layers_inside(
    model: nn.Module, form: FormOf, filter_fn: FilterFn | None
) -> tuple[tuple[Layer, ...], dict[str, str], Mapping[nn.Module, nn.Module], nn.Module]:
    """Return the layers of a model for training, whose weights are its own parameters, or views of them.

    With them come the reasons for all others, what is to stand in for the modules that hold some of the layers, and the
    model's tree with these in their places.
    """
    standing_in, tree = _worth_opening(model, form, filter_fn, in_training=True), model
    if standing_in:
        leaves = {module: module for module in model.modules() if not any(module.children())}  # layers stay the model's
        tree = rewire(model, leaves | standing_in)
        avoid_fast_paths_(tree)
    return *layers_of(tree, form, filter_fn), standing_in, tree


def layers_of(tree: nn.Module, form: FormOf, filter_fn: FilterFn | None) -> tuple[tuple[Layer, ...], dict[str, str]]:
    """Return the layers of a tree in which all is opened that is to be, and for every other module why not."""
    layers, skipped = find_layers(tree, form, filter_fn)
    can_be = replaceable(tree, in_training=True)
    closed = [plain_name(name) for name, module in tree.named_modules() if can_be_opened(module)]
    return layers, in_order_of(tree, skipped | {name: REJECTED if name in can_be else _SHARED for name in closed})


def _worth_opening(
    model: nn.Module, form: FormOf, filter_fn: FilterFn | None, in_training: bool
) -> dict[nn.Module, nn.Module]:
    """Return the modules of which some layer takes part, each with the views that stand in for it."""
    modules = replaceable(model, in_training=in_training).values()
    standing_in = {module: opened(module, ViewLinear) for module in modules}
    layers, _ = find_layers(_put_in(model, standing_in), form, filter_fn) if standing_in else ((), {})
    used = {module for layer in layers for module in layer.modules}
    return {module: made for module, made in standing_in.items() if used & {made, *made.children()}}


def opened_where_it_runs(
    base: nn.Module,
    form: FormOf,
    filter_fn: FilterFn | None,
    batch: Any,
    forward: Forward,
    *,
    in_training: bool = False,
) -> tuple[nn.Module, FilterFn | None, dict[str, str]]:
    """Return the tree with modules opened, a filter for those that are not, and the reason for each of these.

    Those stay that the model does not run without, or not with the same numbers: it may read their weights, ask for
    their class, or call them with more than their input.
    """

    def with_inside(filter_fn: FilterFn | None) -> nn.Module:
        return with_opened(base, _worth_opening(base, form, filter_fn, in_training))

    def only(which: Callable[[str], bool]) -> FilterFn:
        return lambda module, name: which(name) and (filter_fn is None or filter_fn(module, name))

    tree = with_inside(filter_fn)
    names = names_of_opened(tree)
    if batch is None or not names:
        return tree, filter_fn, {}
    first, again = (_outputs(base, batch, forward) for _ in range(2))
    if isinstance(first, str) or isinstance(again, str):  # the model itself fails: the watched pass says so
        return tree, filter_fn, {}
    expected, is_steady = first, _are_close(first, again)

    def failure(tree: nn.Module) -> str | None:
        found = _outputs(tree, batch, forward)
        if isinstance(found, str):
            return found
        return "it gives other numbers" if is_steady and not _are_close(found, expected) else None

    if failure(tree) is None:
        return tree, filter_fn, {}
    found = {
        outer: failure(with_inside(only(lambda name, outer=outer: f"{name}.".startswith(f"{outer}."))))  # type: ignore[misc]
        for outer in names
    }
    closed = {outer: f"the model does not run without it: {error}" for outer, error in found.items() if error}
    keep = only(lambda name: not any(f"{name}.".startswith(f"{outer}.") for outer in closed))
    return with_inside(keep), keep, closed


def refused_calls(tree: nn.Module) -> dict[str, str]:
    """Return why no plain layer has a part in the layers with a forward of their own that are left."""
    can_be = replaceable(tree)
    left = {plain_name(name): module for name, module in tree.named_modules() if may_call(module)}
    return {n: REJECTED if n in can_be else why_not_called(module) or _SHARED for n, module in left.items()}


def _outputs(tree: nn.Module, batch: Any, forward: Forward) -> list[Tensor] | str:
    """Return the numbers that a pass gives, or in one line why it fails.

    PyTorch's fast path of transformers is left out: it gives zeros where a mask hides a position.
    """
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with undisturbed(tree), torch.no_grad():
            leaves = tree_leaves(forward(tree, batch))
    except Exception as error:  # whatever the model's code raises
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _are_close(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Return whether they differ by rounding at most."""
    bounds = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
    return [each.shape for each in found] == [each.shape for each in expected] and all(
        one.is_meta
        or not one.numel()
        or bool((one - other).abs().nan_to_num().max() <= bounds.get(one.dtype, 1e-3) * other.abs().nan_to_num().max())
        for one, other in zip(found, expected, strict=True)
    )
