"""The layers of a model that are decomposed, those inside modules that have to be opened for it among them.

A module is opened only where a layer inside it takes part: what nobody wants to be decomposed stays as it is.
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
from decomposable.core.unpacking import (
    Calling,
    Copies,
    Opened,
    ViewLinear,
    can_be_opened,
    may_call,
    names_of_opened,
    openable,
    opened,
    put_in,
    replaceable,
    why_closed,
    why_not_called,
    with_opened,
)


@dataclass(frozen=True, eq=False)
class Inside:
    """The layers of a model that stays as it is, and why its other modules are none.

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


def layers_inside(model: nn.Module, form: FormOf, filter_fn: FilterFn | None) -> Inside:
    """The layers of a model for training: their weights are its own parameters, or views of them."""
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
    """The layers of a tree in which all is opened that is to be, and for every other module the reason why not."""
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
    """The tree with layers in the place of the modules that hold some which are decomposed: copies of their weights."""
    modules = _worth_opening(base, form, filter_fn, candidates(base))
    tree = with_opened(base, modules, Copies())
    if tree is not base:
        avoid_fast_paths_(tree)
    return tree


def _worth_opening(
    model: nn.Module, form: FormOf, filter_fn: FilterFn | None, modules: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    """Of these modules those of which some layer takes part."""
    if not modules:
        return {}
    standing_in = {module: opened(module, ViewLinear) for module in modules.values()}
    layers, _ = find_layers(put_in(model, standing_in), form, filter_fn)
    used = {module for layer in layers for module in layer.modules}
    return {
        name: module
        for name, module in modules.items()
        if used & {standing_in[module], *(standing_in[module].children() if _is_around(standing_in[module]) else ())}
    }


def _is_around(module: nn.Module) -> bool:
    return isinstance(module, Opened | Calling)


def opened_where_it_runs(
    base: nn.Module,
    form: FormOf,
    filter_fn: FilterFn | None,
    batch: Any,
    forward: Forward,
    candidates: Candidates = replaceable,
) -> tuple[nn.Module, FilterFn | None, dict[str, str]]:
    """The tree with modules opened, but for those that the model does not run without, or not with the same numbers: it
    may read their weights, ask for their class, or call them with more than their input. With it, a filter that knows
    of them, and the reason for each.
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
    """Of the layers with a forward of their own that are left, why no plain layer has a part in it."""
    holders = replaceable(tree)
    left = {plain_name(name): module for name, module in tree.named_modules() if may_call(module)}
    otherwise = {name: REJECTED if name in holders else "its weights are held by other modules" for name in left}
    return {name: why_not_called(module) or otherwise[name] for name, module in left.items()}


@dataclass(frozen=True, eq=False)
class _Expected:
    """What the model gives for a batch, as long as nothing in it is opened."""

    outputs: list[Tensor]
    is_steady: bool  # whether it gives the same again
    batch: Any
    forward: Forward

    @classmethod
    def of(cls, model: nn.Module, batch: Any, forward: Forward) -> _Expected | None:
        """That of a model; None where it does not run."""
        try:
            first, second = (_tensors(_ran(model, batch, forward)) for _ in range(2))
        except Exception:  # whatever the model's code raises
            return None
        return cls(first, _are_close(first, second), batch, forward)

    def failure(self, tree: nn.Module) -> str | None:
        """Why a pass of the tree fails, or that it gives other numbers, in one line; or None."""
        try:
            found = _tensors(_ran(tree, self.batch, self.forward))
        except Exception as error:  # whatever the model's code raises
            return " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return "it gives other numbers" if self.is_steady and not _are_close(found, self.outputs) else None


def _ran(tree: nn.Module, batch: Any, forward: Forward) -> Any:
    """A pass without PyTorch's fast path of transformers, which gives zeros where a mask hides a position."""
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
    """Whether they differ by rounding at most."""
    if [each.shape for each in found] != [each.shape for each in expected]:
        return False
    bounds = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
    return all(
        one.is_meta
        or not one.numel()
        or bool((one - other).abs().nan_to_num().max() <= bounds.get(one.dtype, 1e-3) * other.abs().nan_to_num().max())
        for one, other in zip(found, expected, strict=True)
    )
