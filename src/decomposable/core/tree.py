"""Copying a network's module tree while some of its modules are replaced, and all its tensors are shared.

Both the low-rank network of a joint step and every size of a decomposed network are made like this: the modules are
new and light (no tensor is copied), so the original is never patched, and another thread may go on using it.

Where a network itself has to run, it is left as it was: `undisturbed` and `evaluating`.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from decomposable_edge.errors import UnsupportedModelError

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_PLAIN = frozenset({int, float, bool, str, type(None), Tensor, nn.Parameter})  # most attributes; they lead nowhere
_MAX_DEPTH = 6  # of lists in dicts in lists … that are searched for modules


def unwrap(model: nn.Module) -> nn.Module:
    """The module behind `torch.compile` and `DistributedDataParallel`; refuse what cannot be taken apart."""
    while isinstance(model, nn.Module) and _is_around_another(model):
        model = model._orig_mod if _is_compiled(model) else model.module  # type: ignore[assignment]
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"model: got {type(model).__name__}; allowed: a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModelError("model: got a TorchScript module; allowed: the module before scripting")
    if isinstance(model, nn.DataParallel):
        raise UnsupportedModelError(
            "model: got DataParallel; pass its .module, and for several GPUs DistributedDataParallel(model)"
        )
    return model


def data_parallel(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """The `DistributedDataParallel` around a model, where there is one."""
    while isinstance(model, nn.Module) and _is_around_another(model):
        if isinstance(model, nn.parallel.DistributedDataParallel):
            return model
        model = model._orig_mod  # type: ignore[assignment]
    return None


def refuse_sharded(model: nn.Module) -> None:
    """A weight of which a process has a part only cannot be decomposed there."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") or "_fsdp_wrapped_module" in name:
            raise UnsupportedModelError(
                f"model: '{name}' is sharded over processes (fully_shard, FSDP), and an SVD needs all of it; allowed: "
                "DistributedDataParallel(model), or the model as it is before it is sharded"
            )


def _is_around_another(module: nn.Module) -> bool:
    return _is_compiled(module) or isinstance(module, nn.parallel.DistributedDataParallel)


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def plain_name(name: str) -> str:
    """A module's name without what `torch.compile` puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def rewire(root: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A copy of the module tree that shares every tensor, with some modules replaced wherever they are referred to.

    References are followed through attributes, lists, tuples, dicts, bound methods and partial functions, so that a
    model which keeps its blocks in a plain list, or hooks that are methods, lead to the copy and not to the original.
    Compiled children are replaced by what they compile.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> twin = rewire(model, {model[1]: nn.Tanh()})
    >>> type(twin[1]).__name__, twin[0].weight is model[0].weight, type(model[1]).__name__
    ('Tanh', True, 'ReLU')
    """
    twins: dict[nn.Module, nn.Module] = dict(replacements)
    modules = list(root.modules())
    originals = [m for m in modules if m not in twins and not _is_compiled(m)]
    for module in originals:
        twins[module] = object.__new__(type(module))
    for module in modules:
        if _is_compiled(module):
            twins[module] = twins[module._orig_mod]  # type: ignore[index]
    for module, replacement in replacements.items():
        for hooks in _HOOKS:  # the replaced module's, turned to the copy
            getattr(replacement, hooks).update(_follow(getattr(module, hooks), twins, 0))
        attributes = replacement.__dict__
        for name in attributes.get("_references", ()):  # of a stand-in: what the replaced module knew of others
            attributes[name] = _follow(attributes[name], twins, 0)
    for module in originals:
        # __dict__ and not setattr: a module's own __setattr__ may do anything.
        attributes = twins[module].__dict__
        for name, value in module.__dict__.items():
            attributes[name] = value if type(value) in _PLAIN else _follow(value, twins, 0)
        attributes.pop("_compiled_call_impl", None)
    return twins[root]


def _follow(value: Any, twins: Mapping[nn.Module, nn.Module], depth: int) -> Any:
    """`value` with every reference to a module turned to its twin; containers are new, anything else is shared."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, nn.Module):
        return twins.get(value, value)
    if kind is types.MethodType and isinstance(value.__self__, nn.Module):
        twin = twins.get(value.__self__, value.__self__)
        if isinstance(twin, type(value.__self__)):
            return types.MethodType(value.__func__, twin)
        return getattr(twin, value.__func__.__name__, value)  # a replacement has its own method of that name
    if kind is functools.partial:
        arguments = (_follow(a, twins, depth + 1) for a in value.args)
        keywords = {k: _follow(v, twins, depth + 1) for k, v in value.keywords.items()}
        return functools.partial(_follow(value.func, twins, depth + 1), *arguments, **keywords)
    if depth >= _MAX_DEPTH:
        return value
    if kind is dict or kind is OrderedDict:
        if not value:
            return kind()
        followed_items = {k: v if type(v) in _PLAIN else _follow(v, twins, depth + 1) for k, v in value.items()}
        return followed_items if kind is dict else OrderedDict(followed_items)
    if kind is list or kind is tuple:
        followed = [_follow(v, twins, depth + 1) for v in value]
        # A list without modules stays the very same list: it may be where the model collects something.
        return value if all(a is b for a, b in zip(followed, value, strict=True)) else kind(followed)
    return set(value) if kind is set else value


def clone_buffers_(root: nn.Module) -> None:
    """Give the tree buffers of its own, equal to those it has; a buffer held twice stays one buffer."""
    clones: dict[int, Tensor] = {}
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = clones.setdefault(id(buffer), buffer.detach().clone())


def own_parameters_(root: nn.Module) -> None:
    """Give the tree parameters of its own, of equal values: `_apply` changes them in place; one held twice is one."""
    twins: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in twins:
                    twins[parameter] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                    twins[parameter].__dict__.update(parameter.__dict__)
                module._parameters[name] = twins[parameter]


def put_parameters_(root: nn.Module, replacements: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters of the tree wherever they are held; one held twice is replaced by one."""
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in replacements:
                module._parameters[name] = replacements[parameter]


def deep_copy(root: nn.Module) -> nn.Module:
    """An independent copy; tensors that a forward pass left behind as plain attributes come without their graph."""
    memo = {
        id(value): value.detach().clone()
        for module in root.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        return copy.deepcopy(root, memo)
    except Exception as error:
        raise UnsupportedModelError(f"model: {type(root).__name__} cannot be copied: {error}") from error


def settle_lazy_(root: nn.Module) -> None:
    """Take from layers that were lazy, and have seen an input since, the hook that waits for one: in a copy they cannot
    do so themselves.
    """
    for module in root.modules():
        hooks = module._forward_pre_hooks
        for key, hook in list(hooks.items()):
            if getattr(hook, "__name__", "") == "_infer_parameters" and not isinstance(module, LazyModuleMixin):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def remembered(model: nn.Module) -> Callable[[], None]:
    """A function that takes the model's buffers and torch's random numbers back to what they are now."""
    held = [(module, dict(module._buffers)) for module in model.modules()]
    buffers = {id(b): b for _, own in held for b in own.values() if b is not None and not is_lazy(b)}
    values = {key: buffer.detach().clone() for key, buffer in buffers.items()}
    random = torch.get_rng_state()
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    random_there = {device: torch.cuda.get_rng_state(device) for device in devices}

    @torch.no_grad()
    def restore() -> None:
        for key, buffer in buffers.items():
            buffer.copy_(values[key])
        for module, own in held:
            module._buffers.update({name: b for name, b in own.items() if b is None or not is_lazy(b)})
        torch.set_rng_state(random)
        for device, state in random_there.items():
            torch.cuda.set_rng_state(state, device)

    return restore


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Passes inside draw no random numbers, and what they write to buffers is undone."""
    restore = remembered(model)
    try:
        yield
    finally:
        restore()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
