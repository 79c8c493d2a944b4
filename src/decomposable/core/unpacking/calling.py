"""Convolutions and `Linear` layers with a forward of their own, which pads or standardises, and then makes one call.

    Conv2dSame:  x ── pad ── conv2d(·, weight) ── y          StdConv2d:  x ── conv2d(·, standardised weight) ── y
                             └─ a plain layer here                           └─ a plain layer with that weight here

What a forward does is not read from its code but seen: it runs on made-up inputs of several sizes. Where it makes one
call of its kind, always with the same weight, bias and geometry, a plain layer makes that call from then on. The rest
of the forward, before and behind it, is the module's own code, which goes on as it is, at any size of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from decomposable.core.tree import evaluating, undisturbed
from decomposable_edge.errors import InvalidArgumentError

_PLAIN: Mapping[type[nn.Module], Any] = {
    nn.Linear: F.linear,
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_INTERNAL = frozenset(vars(nn.Module()))  # hooks, parameters, flags: every module has its own
_CLOSE = 1e-4  # of the largest output: two convolutions may differ in the order of their sums

Given = Mapping[str, Any]
Geometry = tuple[Any, ...]


def has_own_forward(module: nn.Module) -> bool:
    """Whether a convolution or `Linear` does something else than its plain kind."""
    plain = next((kind for kind in (*_PLAIN, *_TRANSPOSED) if isinstance(module, kind)), None)
    methods = [method for method in ("forward", "_conv_forward") if hasattr(plain, method)]
    is_patched = any(method in vars(module) for method in methods)
    return is_patched or any(getattr(type(module), method) is not getattr(plain, method) for method in methods)


def may_call(module: nn.Module) -> bool:
    """Whether it is a layer, of one group, whose own forward may make one call of its kind."""
    if not isinstance(module, tuple(_PLAIN)) or getattr(module, "groups", 1) != 1 or is_parametrized(module):
        return False
    weight = module._parameters.get("weight")
    is_known = weight is not None and not is_lazy(weight) and weight.is_floating_point() and weight.numel() > 0
    return (
        is_known and has_own_forward(module) and "forward" not in vars(module) and "_conv_forward" not in vars(module)
    )


class Refused(ValueError):
    """A forward that no plain layer can have a part in; the text says why."""


class _Noted(Exception):
    """The call of a forward was seen, and the rest of it is not needed."""


class _Calls(TorchFunctionMode):
    """Inside, `make` makes all calls of a function."""

    def __init__(self, function: Any, make: Callable[[Given], Tensor]) -> None:
        super().__init__()
        self._function, self._make = function, make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not self._function:
            return func(*args, **(kwargs or {}))
        return self._make({**dict(zip(_ARGUMENTS, args, strict=False)), **(kwargs or {})})


def _geometry(given: Given, axes: int) -> Geometry:
    """Stride, padding, dilation and groups of a call, in full."""
    defaults = {"stride": 1, "padding": 0, "dilation": 1}
    found = [given.get(name, value) for name, value in defaults.items()] if axes else []
    spread = [value if isinstance(value, str) else _each(value, axes) for value in found]
    return (*spread, given.get("groups", 1))


def _each(value: Any, axes: int) -> tuple[int, ...]:
    numbers = tuple(value) if isinstance(value, tuple | list) else (value,)
    return numbers * axes if len(numbers) == 1 else numbers


class Calling(nn.Module):
    """Runs the forward of a layer's own class; the call in it is made by a plain layer, which is its child.

    The options of the layer are there, by their names. Of its parameters, those that only the call has needed are gone:
    code that asks for them finds numbers without a meaning, of the same shape.
    """

    _kind: type[nn.Module]
    _child: str
    _geometry: Geometry
    _blanks: dict[str, tuple[int, ...]]
    _known: set[tuple[int, ...]]  # shapes of inputs that the call has the same weight for

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's class has it; with the input alone, as it was watched."""
        if len(args) + len(kwargs) != 1:
            raise InvalidArgumentError(
                f"{self._kind.__name__}: its forward is called with {len(args) + len(kwargs)} arguments; allowed: one"
            )
        made, itself = 0, self._itself()

        def make(given: Given) -> Tensor:
            nonlocal made
            made += 1
            found = _geometry(given, len(self._geometry[0]) if len(self._geometry) > 1 else 0)
            if found != self._geometry or made > 1:
                what = f"makes {made} calls" if made > 1 else f"has stride, padding, dilation and groups {found}"
                raise InvalidArgumentError(
                    f"{self._kind.__name__}: its forward {what} for this input; allowed: one call with {self._geometry}"
                )
            self._require_same_weight(given, itself)
            result: Tensor = self._modules[self._child](given["input"])  # type: ignore[misc]
            return result

        with _Calls(_function_of(self._kind), make):
            return self._kind.forward(itself, *args, **kwargs)

    def _require_same_weight(self, given: Given, itself: nn.Module) -> None:
        """Refuse a weight or bias that is computed in another way for inputs of this size than for small ones.

        The plain layer holds what was computed once. What the code computes of numbers without a meaning tells whether
        it is the same now; an exporter sees the sizes that a network was seen with.
        """
        shape = tuple(given["input"].shape)
        held = tuple(itself._parameters.values())
        computed = [name for name in ("weight", "bias") if not any(given.get(name) is each for each in (None, *held))]
        if not computed or torch.compiler.is_compiling() or shape in self._known:
            return
        usual = self._usual(itself)
        if not all(_is_same(given[name], usual.get(name)) for name in computed):
            raise InvalidArgumentError(
                f"{self._kind.__name__}: its forward has another weight for an input of shape {shape}; allowed: one "
                "that does not depend on the input, or filter_fn= to leave the layer as it is"
            )
        self._known.add(shape)

    def _usual(self, itself: nn.Module) -> Given:
        """What the call is made with for a small input."""
        found: dict[str, Any] = {}

        def note(given: Given) -> Tensor:
            found.update(given)
            raise _Noted

        with _Calls(_function_of(self._kind), note), undisturbed(self), torch.no_grad(), suppress(_Noted):
            self._kind.forward(itself, next(_made_up(itself)))
        return found

    def _itself(self) -> nn.Module:
        """A module of the layer's class, for its own code. What it computes of the blanks differs along the inputs."""
        itself = object.__new__(self._kind)
        itself.__dict__.update(vars(self))
        like = next(self._modules[self._child].parameters())  # type: ignore[union-attr]
        blanks: Any = {name: _blank(shape, like) for name, shape in self._blanks.items()}
        itself.__dict__["_parameters"] = {**self._parameters, **blanks}
        itself.__dict__["_modules"] = {name: each for name, each in self._modules.items() if name != self._child}
        return itself


def _blank(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Numbers without a meaning in this shape, the same for every output."""
    count = math.prod(shape[1:])
    return torch.linspace(0.5, 1.5, count, dtype=like.dtype, device=like.device).view(1, *shape[1:]).expand(shape)


def _function_of(kind: type[nn.Module]) -> Any:
    return next(function for plain, function in _PLAIN.items() if issubclass(kind, plain))


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a call was made with."""

    weight: Tensor
    bias: Tensor | None
    geometry: Geometry


def calling(module: nn.Module) -> Calling:
    """What takes the place of a layer that `check_calls` lets pass, with parameters of its own."""
    x = next(_made_up(module))
    return _made(module, _watched(module, x)[0], _used_besides(module, x))


def check_calls(module: nn.Module) -> None:
    """Raise `Refused` where a plain layer cannot make the call in a layer's forward at every size of the input."""
    inputs = list(_made_up(module))
    seen, found = zip(*(_watched(module, x) for x in inputs), strict=True)
    for one in seen[1:]:
        if one.geometry != seen[0].geometry:
            raise Refused("whose padding or stride depends on the size of the input")
        if not _is_same(one.weight, seen[0].weight) or not _is_same(one.bias, seen[0].bias):
            raise Refused("whose weight depends on the input")
    used = _used_besides(module, inputs[0])
    if "weight" in used:
        raise Refused("which uses its weight for more than one call")
    made = _made(module, seen[0], used)
    with evaluating(made), undisturbed(made), torch.no_grad():
        for x, expected in zip(inputs, found, strict=True):
            if not _is_close(made(x), expected):
                raise Refused("which gives other numbers with a plain layer in it")


def _made(module: nn.Module, seen: _Seen, used: set[str]) -> Calling:
    made = Calling()
    own = {name: value for name, value in vars(module).items() if name not in _INTERNAL}
    gone = [name for name, p in module._parameters.items() if p is not None and name not in used]
    child = "linear" if isinstance(module, nn.Linear) else "conv"
    while child in module._modules or hasattr(type(module), child):
        child += "_"
    made.__dict__.update(
        own,
        _kind=type(module),
        _child=child,
        _geometry=seen.geometry,
        _blanks={name: tuple(p.shape) for name, p in module._parameters.items() if p is not None and name in gone},
        _known=set(),
        _references=tuple(own),
        training=module.training,
    )
    made._parameters.update({name: p for name, p in module._parameters.items() if name not in gone})
    made._buffers.update(module._buffers)
    made._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    made._modules.update(module._modules)
    made._modules[child] = _plain(module, seen)
    return made


def _plain(module: nn.Module, seen: _Seen) -> nn.Module:
    """The layer that makes the call."""
    has_bias, layer = seen.bias is not None, None
    if isinstance(module, nn.Linear):
        layer = nn.Linear(module.in_features, module.out_features, bias=has_bias, device="meta")
    else:
        stride, padding, dilation, _ = seen.geometry
        outputs, inputs, *kernel = seen.weight.shape
        kind: Any = next(plain for plain in _PLAIN if isinstance(module, plain))
        options = {"stride": stride, "padding": padding, "dilation": dilation, "bias": has_bias, "device": "meta"}
        layer = kind(inputs, outputs, tuple(kernel), **options)
    trained = [p.requires_grad for p in (module._parameters["weight"], module._parameters.get("bias")) if p is not None]
    layer.weight = nn.Parameter(seen.weight.detach().clone().contiguous(), requires_grad=trained[0])
    if seen.bias is not None:
        layer.bias = nn.Parameter(seen.bias.detach().clone(), requires_grad=trained[-1])
    return layer.train(module.training)


def _made_up(module: nn.Module) -> Iterator[Tensor]:
    """Inputs of several sizes: paddings that depend on it do so by how strides divide it."""
    weight = module._parameters["weight"]
    assert weight is not None
    numbers = torch.Generator().manual_seed(0)
    if isinstance(module, nn.Linear):
        shapes = [(2, module.in_features), (3, module.in_features), (2, 3, module.in_features)]
    else:
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        pairs = zip(module.kernel_size, module.dilation, strict=True)
        least = [(size - 1) * apart + 1 for size, apart in pairs]
        steps = max(2, *module.stride)
        sizes = [[size + 2 + (more + i) % (steps + 1) for i, size in enumerate(least)] for more in range(steps + 1)]
        shapes = [(1, module.in_channels, *size) for size in [*sizes, [2 * size + 7 for size in least]]]
    for shape in shapes:
        yield torch.randn(shape, generator=numbers).to(weight.device, weight.dtype)


def _watched(module: nn.Module, x: Tensor) -> tuple[_Seen, Any]:
    """The one call that a forward makes, and what it returns."""
    kind = type(module)
    function = _function_of(kind)
    axes = 0 if isinstance(module, nn.Linear) else x.dim() - 2
    held = {name: p.detach().clone() for name, p in module._parameters.items() if p is not None}
    seen: list[_Seen] = []

    def make(given: Given) -> Tensor:
        bias = given.get("bias")
        seen.append(_Seen(given["weight"].detach(), None if bias is None else bias.detach(), _geometry(given, axes)))
        made: Tensor = function(**given)
        return made

    try:
        with evaluating(module), undisturbed(module), torch.no_grad(), _Calls(function, make):
            found = module.forward(x)
    except Exception as error:  # code of somebody else
        raise Refused(f"which fails on an input of its own size ({type(error).__name__})") from error
    for name, before in held.items():
        parameter = module._parameters[name]
        if parameter is None or not _is_same(parameter.detach(), before):
            with torch.no_grad():
                module.get_parameter(name).copy_(before)
            raise Refused("which writes to its parameters")
    if len(seen) != 1:
        raise Refused(f"which makes {len(seen)} calls of {function.__name__}")
    own = module._parameters["weight"]
    assert own is not None
    if seen[0].weight.shape != own.shape or seen[0].geometry[-1] != 1 or not isinstance(found, Tensor):
        raise Refused("whose call has another weight, or groups")
    return seen[0], found


def _used_besides(module: nn.Module, x: Tensor) -> set[str]:
    """The parameters that the output depends on in another way than by the call."""
    kind, function = type(module), _function_of(type(module))
    leaves = {n: p.detach().clone().requires_grad_() for n, p in module._parameters.items() if p is not None}
    itself = object.__new__(kind)
    itself.__dict__.update(vars(module), training=False, _parameters={**module._parameters, **leaves})
    with undisturbed(module), torch.enable_grad():
        with _Calls(function, lambda given: function(**given).detach()):
            found = kind.forward(itself, x)
        if not found.requires_grad:
            return set()
        gradients = torch.autograd.grad(found.sum(), list(leaves.values()), allow_unused=True)
    return {name for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None}


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.is_meta or other.is_meta:
        return (one is None) == (other is None)
    return bool(torch.equal(one, other)) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_meta:
        return True
    exact = 20 * torch.finfo(one.dtype).eps
    return bool((one - other).abs().max() <= max(_CLOSE, exact) * other.abs().max())
