"""Copying a network's module tree while some of its modules are replaced, and all its tensors are shared.

The low-rank network of a joint step and every size of a decomposed network are made like this: the modules are new and
light (no tensor is copied), so the original is never patched, and another thread may use it meanwhile.

Where a network itself has to run, it is left as it was: `undisturbed` and `evaluating`.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from decomposable_edge.errors import UnsupportedModelError
from decomposable_edge.text import first_line

FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_INTERNAL = frozenset(vars(nn.Module()))  # hooks, parameters, flags: every module has its own
_PLAIN = frozenset({int, float, bool, str, type(None), Tensor, nn.Parameter})  # most attributes; they lead nowhere
_LEAVES = (int, float, bool, str, type(None), torch.dtype, torch.device)
_MAX_DEPTH = 6  # of lists in dicts in lists … that are searched for modules
_Module = TypeVar("_Module", bound=nn.Module)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module behind `torch.compile` and `DistributedDataParallel`; refuse what cannot be taken apart."""
    *_, model = _unwrapping(model)
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError.about("model", type(model).__name__, "a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModelError.about("model", "a TorchScript module", "the module before scripting")
    if isinstance(model, nn.DataParallel):
        allowed = "its .module, and for several GPUs DistributedDataParallel(model)"
        raise UnsupportedModelError.about("model", "DataParallel", allowed)
    return model


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` around a model, where there is one."""
    return next((each for each in _unwrapping(model) if isinstance(each, DistributedDataParallel)), None)


def _unwrapping(model: Any) -> Iterator[Any]:
    yield model
    while _is_compiled(model) or isinstance(model, DistributedDataParallel):
        model = model._orig_mod if _is_compiled(model) else model.module
        yield model


def _is_compiled(module: Any) -> bool:
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def refuse_sharded(model: nn.Module) -> None:
    """Refuse weights of which a process has only a part: they cannot be decomposed there."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") or "_fsdp_wrapped_module" in name:
            raise UnsupportedModelError(
                f"model: '{name}' is sharded over processes (fully_shard, FSDP), and an SVD needs all of it; allowed: "
                "DistributedDataParallel(model), or the model as it is before it is sharded"
            )


def plain_name(name: str) -> str:
    """Return a module's name without what `torch.compile` puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def rewire(root: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Return a copy of the module tree that shares every tensor, with some modules replaced wherever they are used.

    References are followed through attributes, lists, tuples, dicts, bound methods and partial functions: blocks in a
    plain list, and hooks that are methods, lead to the copy and not to the original. Compiled children are replaced by
    what they compile. A module that is to replace itself stays as it is.

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
        if module is replacement:
            continue
        for hooks in FORWARD_HOOKS:  # the replaced module's, turned to the copy
            getattr(replacement, hooks).update(_follow(getattr(module, hooks), twins, 0))
        attributes = replacement.__dict__
        for name in attributes.get("_references", ()):  # of a `hollow` one: what the replaced module knew of others
            attributes[name] = _follow(attributes[name], twins, 0)
    for module in originals:
        # __dict__ and not setattr: a module's own __setattr__ may do anything.
        attributes = twins[module].__dict__
        for name, value in module.__dict__.items():
            attributes[name] = value if type(value) in _PLAIN else _follow(value, twins, 0)
        attributes.pop("_compiled_call_impl", None)
    return twins[root]


def _follow(value: Any, twins: Mapping[nn.Module, nn.Module], depth: int) -> Any:
    """Return `value` with every module turned to its twin; containers are new, anything else is shared."""
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
        inner = _follow([value.func, value.args, value.keywords], twins, depth)
        return functools.partial(inner[0], *inner[1], **inner[2])
    if depth >= _MAX_DEPTH:
        return value
    if kind is dict or kind is OrderedDict:
        if not value:
            return kind()
        items = {k: v if type(v) in _PLAIN else _follow(v, twins, depth + 1) for k, v in value.items()}
        return items if kind is dict else OrderedDict(items)
    if kind is list or kind is tuple:
        followed = [_follow(v, twins, depth + 1) for v in value]
        # A list without modules stays the very same list: it may be where the model collects something.
        return value if all(a is b for a, b in zip(followed, value, strict=True)) else kind(followed)
    return set(value) if kind is set else value


def hollow(kind: type[_Module], module: nn.Module, without: Sequence[str] = (), **attributes: Any) -> _Module:
    """Return a module of a kind with the attributes of another one, and no weights, buffers, children or hooks yet.

    What may lead to other modules is named in `_references`: they are others in a copy of the network.
    """
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    own = {name: value for name, value in vars(module).items() if name not in _INTERNAL and name not in without}
    flat = {name: value if type(value) is tuple else (value,) for name, value in own.items()}
    references = tuple(name for name, values in flat.items() if not all(isinstance(v, _LEAVES) for v in values))
    made.__dict__.update(own, _references=references, training=module.training, **attributes)
    return made


def clone_buffers_(root: nn.Module) -> None:
    """Give the tree buffers of its own, equal to those it has; a buffer held twice stays one buffer."""
    clones: dict[Tensor, Tensor] = {}
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = clones.setdefault(buffer, buffer.detach().clone())


def own_parameters_(root: nn.Module) -> None:
    """Give the tree parameters of its own, of equal values: `_apply` changes them in place."""
    twins = {p: nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in root.parameters()}
    for parameter, twin in twins.items():
        twin.__dict__.update(parameter.__dict__)
    put_parameters_(root, twins)


def put_parameters_(root: nn.Module, replacements: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters of the tree wherever they are held; one held twice is replaced by one."""
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in replacements:
                module._parameters[name] = replacements[parameter]


def deep_copy(root: nn.Module) -> nn.Module:
    """Return an independent copy; tensors that a pass left behind as plain attributes come without their graph."""
    memo = {
        id(value): value.detach().clone()
        for module in root.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        return copy.deepcopy(root, memo)
    except Exception as error:
        kind = type(root).__name__
        why = f"a {kind} cannot be copied: {first_line(error)}"
        raise UnsupportedModelError.about("model", kind, "one that copy.deepcopy can copy", why=why) from error


def settle_lazy_(root: nn.Module) -> None:
    """Take out the hooks of layers that are lazy no more: in a copy, layers cannot do so themselves."""
    for module in root.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "__name__", "") == "_infer_parameters" and not isinstance(module, LazyModuleMixin):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def remembered(model: nn.Module) -> Callable[[], None]:
    """Return a function that takes the model's buffers and torch's random numbers back to what they are now."""
    held = [(module, dict(module._buffers)) for module in model.modules()]
    buffers = {b for _, own in held for b in own.values() if b is not None and not is_lazy(b)}
    values = {buffer: buffer.detach().clone() for buffer in buffers}
    random = torch.get_rng_state()
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    random_there = {device: torch.cuda.get_rng_state(device) for device in devices}

    @torch.no_grad()
    def restore() -> None:
        for buffer, value in values.items():
            buffer.copy_(value)
        for module, own in held:
            module._buffers.update({name: b for name, b in own.items() if b is None or not is_lazy(b)})
        torch.set_rng_state(random)
        for device, state in random_there.items():
            torch.cuda.set_rng_state(state, device)

    return restore


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Draw no random numbers in passes inside, and undo what they write to buffers."""
    restore = remembered(model)
    try:
        yield
    finally:
        restore()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode inside; afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
