"""Convolutions and `Linear` layers with a forward of their own, which pads or standardises, and then makes one call.

    Conv2dSame:  x ── pad ── conv2d(·, weight) ── y          StdConv2d:  x ── conv2d(·, standardised weight) ── y
                             └─ a plain layer here                           └─ a plain layer with that weight here

What a forward does is not read from its code but seen: it runs on made-up inputs of several sizes. Where it makes one
call of its kind, always with the same weight, bias and geometry, a plain layer makes that call from then on. The rest
of the forward, before and behind it, is the module's own code, which runs as before, at any size of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from decomposable.core.tree import evaluating, hollow, undisturbed
from decomposable_edge.errors import InvalidArgumentError

_PLAIN: Mapping[type[nn.Module], Any] = {
    nn.Linear: F.linear,
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}
_KINDS = (*_PLAIN, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CLOSE = 1e-4  # of the largest output: two convolutions may differ in the order of their sums

Given = Mapping[str, Any]
Geometry = tuple[Any, ...]
"""Stride, padding, dilation and groups of a call; of a linear one the last alone."""


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a convolution or `Linear` does something else than its plain kind."""
    plain = next((kind for kind in _KINDS if isinstance(module, kind)), None)
    methods = [name for name in ("forward", "_conv_forward") if hasattr(plain, name)]
    kind = type(module)
    return any(name in vars(module) or getattr(kind, name) is not getattr(plain, name) for name in methods)


def may_call(module: nn.Module) -> bool:
    """Return whether it is a layer, of one group, whose own forward may make one call of its kind."""
    if not isinstance(module, tuple(_PLAIN)) or getattr(module, "groups", 1) != 1 or is_parametrized(module):
        return False
    weight = module._parameters.get("weight")
    is_known = weight is not None and not is_lazy(weight) and weight.is_floating_point() and weight.numel() > 0
    return is_known and has_own_forward(module) and not {"forward", "_conv_forward"} & vars(module).keys()


class _Calls(TorchFunctionMode):
    """Let `make` make all calls of a kind of layer inside."""

    def __init__(self, kind: type[nn.Module], make: Callable[[Given], Tensor]) -> None:
        super().__init__()
        self._function, self._make = _function_of(kind), make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not self._function:
            return func(*args, **(kwargs or {}))
        return self._make({**dict(zip(_ARGUMENTS, args, strict=False)), **(kwargs or {})})


def _function_of(kind: type[nn.Module]) -> Any:
    return next(function for plain, function in _PLAIN.items() if issubclass(kind, plain))


def _geometry(given: Given, axes: int) -> Geometry:
    def each(value: Any) -> Any:
        numbers = tuple(value) if isinstance(value, tuple | list) else (value,)
        return value if isinstance(value, str) else numbers * axes if len(numbers) == 1 else numbers

    defaults = {"stride": 1, "padding": 0, "dilation": 1} if axes else {}
    return (*(each(given.get(name, value)) for name, value in defaults.items()), given.get("groups", 1))


class Calling(nn.Module):
    """Run the forward of a layer's own class; the call in it is made by a plain layer, which is its child.

    The options of the layer are there, by their names. Of its parameters, those that only the call has needed are gone:
    code that asks for them finds numbers without a meaning, of the same shape.
    """

    _kind: type[nn.Module]
    _child: str  # its name
    _geometry: Geometry
    _blanks: dict[str, tuple[int, ...]]  # shapes of the parameters that are gone
    _known: set[tuple[int, ...]]  # shapes of inputs that the call has the same weight for

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the layer's class does, with the input alone, as it was watched."""
        if len(args) + len(kwargs) != 1:
            raise self._refusal(f"is called with {len(args) + len(kwargs)} arguments", "one")
        made, itself = 0, self._itself()

        def make(given: Given) -> Tensor:
            nonlocal made
            made += 1
            found = _geometry(given, len(self._geometry[0]) if len(self._geometry) > 1 else 0)
            if found != self._geometry or made > 1:
                what = f"makes {made} calls" if made > 1 else f"has stride, padding, dilation and groups {found}"
                raise self._refusal(f"{what} for this input", f"one call with {self._geometry}")
            self._require_same_weight(given, itself)
            result: Tensor = self._modules[self._child](given["input"])  # type: ignore[misc]
            return result

        with _Calls(self._kind, make):
            return self._kind.forward(itself, *args, **kwargs)

    def _refusal(self, came: str, allowed: str) -> InvalidArgumentError:
        return InvalidArgumentError.about(self._kind.__name__, came, allowed, why=f"its forward {came}")

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
        usual: dict[str, Any] = {}

        def note(small: Given) -> Any:
            usual.update(small)
            return _function_of(self._kind)(**small)

        with _Calls(self._kind, note), undisturbed(self), torch.no_grad():
            self._kind.forward(itself, next(_made_up(itself)))
        if not all(_is_same(given[name], usual.get(name)) for name in computed):
            allowed = "one that does not depend on the input, or filter_fn= to leave the layer as it is"
            raise self._refusal(f"has another weight for an input of shape {shape}", allowed)
        self._known.add(shape)

    def _itself(self) -> nn.Module:
        """Return a module of the layer's class, for its own code, with blanks that differ along the inputs only."""
        itself = object.__new__(self._kind)
        itself.__dict__.update(vars(self))
        like = next(self._modules[self._child].parameters())  # type: ignore[union-attr]
        blanks: dict[str, Any] = {}
        for name, shape in self._blanks.items():
            inputs = torch.linspace(0.5, 1.5, math.prod(shape[1:]), dtype=like.dtype, device=like.device)
            blanks[name] = inputs.view(1, *shape[1:]).expand(shape)
        itself.__dict__["_parameters"] = {**self._parameters, **blanks}
        itself.__dict__["_modules"] = {name: each for name, each in self._modules.items() if name != self._child}
        return itself


class _Refused(ValueError):
    """Say why no plain layer can have a part in a forward."""


class _Seen(NamedTuple):
    """What a call was made with, and what its forward returned."""

    weight: Tensor
    bias: Tensor | None
    geometry: Geometry
    used: set[str]  # parameters that the output depends on in another way than by the call
    output: Tensor


def calling(module: nn.Module) -> Calling:
    """Return what takes the place of a layer that `why_not_called` lets pass, with parameters of its own."""
    return _made(module, _watched(module, next(_made_up(module))))


def why_not_called(module: nn.Module) -> str | None:
    """Return the reason why no plain layer can make the call in a layer's own forward at every size, or None."""
    inputs = list(_made_up(module))
    try:
        first, *others = seen = [_watched(module, x) for x in inputs]
        if any(one.geometry != first.geometry for one in others):
            raise _Refused("whose padding or stride depends on the size of the input")
        if not all(_is_same(one.weight, first.weight) and _is_same(one.bias, first.bias) for one in others):
            raise _Refused("whose weight depends on the input")
        if "weight" in first.used:
            raise _Refused("which uses its weight for more than one call")
        made = _made(module, first)
        with evaluating(made), undisturbed(made), torch.no_grad():
            if not all(_is_close(made(x), one.output) for x, one in zip(inputs, seen, strict=True)):
                raise _Refused("which gives other numbers with a plain layer in it")
    except _Refused as why:
        return f"{type(module).__name__} has a forward of its own, {why}"
    return None


def _watched(module: nn.Module, x: Tensor) -> _Seen:
    """Return the one call that a forward makes, in a module of the same class with copies of its parameters."""
    kind = type(module)
    function, axes = _function_of(kind), 0 if isinstance(module, nn.Linear) else x.dim() - 2
    own = {name: p for name, p in module._parameters.items() if p is not None}
    leaves = {name: nn.Parameter(p.detach().clone()) for name, p in own.items()}
    itself = object.__new__(kind)
    itself.__dict__.update(vars(module), training=False, _parameters={**module._parameters, **leaves})
    calls: list[tuple[Tensor, Tensor | None, Geometry]] = []

    def make(given: Given) -> Tensor:
        given = {name: each.detach() if isinstance(each, Tensor) else each for name, each in given.items()}
        calls.append((given["weight"], given.get("bias"), _geometry(given, axes)))
        made: Tensor = function(**given)
        return made

    try:
        with evaluating(module), undisturbed(module), torch.enable_grad(), _Calls(kind, make):
            output = kind.forward(itself, x)
    except Exception as error:  # code of somebody else
        raise _Refused(f"which fails on an input of its own size ({type(error).__name__})") from error
    if not all(_is_same(itself._parameters.get(name), p) for name, p in own.items()):
        raise _Refused("which writes to its parameters")
    if len(calls) != 1:
        raise _Refused(f"which makes {len(calls)} calls of {function.__name__}")
    ((weight, bias, geometry),) = calls
    if weight.shape != own["weight"].shape or geometry[-1] != 1 or not isinstance(output, Tensor):
        raise _Refused("whose call has another weight, or groups")
    used: set[str] = set()
    if output.requires_grad:
        gradients = torch.autograd.grad(output.sum(), list(leaves.values()), allow_unused=True)
        used = {name for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None}
    return _Seen(weight, bias, geometry, used, output.detach())


def _made(module: nn.Module, seen: _Seen) -> Calling:
    """Return what takes a layer's place, around a plain layer that makes the call."""
    blanks = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None and name not in seen.used}
    child = "linear" if isinstance(module, nn.Linear) else "conv"
    while child in module._modules or hasattr(type(module), child):
        child += "_"
    made = hollow(Calling, module, _kind=type(module), _child=child, _geometry=seen.geometry)
    made._blanks, made._known = blanks, set()
    made._parameters.update({name: p for name, p in module._parameters.items() if name not in blanks})
    made._buffers.update(module._buffers)
    made._non_persistent_buffers_set = set(module._non_persistent_buffers_set)

    outputs, inputs, *kernel = seen.weight.shape
    if isinstance(module, nn.Linear):
        layer: Any = nn.Linear(inputs, outputs, bias=seen.bias is not None, device="meta")
    else:
        options = dict(zip(("stride", "padding", "dilation"), seen.geometry, strict=False))
        kind: Any = next(plain for plain in _PLAIN if isinstance(module, plain))
        layer = kind(inputs, outputs, tuple(kernel), bias=seen.bias is not None, device="meta", **options)
    trained = [p.requires_grad for p in (module._parameters["weight"], module._parameters.get("bias")) if p is not None]
    layer.weight = nn.Parameter(seen.weight.clone().contiguous(), requires_grad=trained[0])
    if seen.bias is not None:
        layer.bias = nn.Parameter(seen.bias.clone(), requires_grad=trained[-1])
    made._modules.update({**module._modules, child: layer.train(module.training)})
    return made


def _made_up(module: nn.Module) -> Iterator[Tensor]:
    """Yield inputs of several sizes: paddings that depend on it do so by how strides divide it."""
    weight: Any = module._parameters["weight"]
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


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.is_meta or other.is_meta:
        return (one is None) == (other is None)
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.is_meta:
        return one.shape == other.shape and one.dtype == other.dtype
    exact = 20 * torch.finfo(one.dtype).eps
    return bool((one - other).abs().max() <= max(_CLOSE, exact) * other.abs().max())
