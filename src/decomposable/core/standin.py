"""What takes a decomposed layer's place, and answers for it when the model asks about the layer.

Models do not only call their layers: they ask for `stride` or `in_features`, and cast their input to `weight.dtype`.
A `StandIn` has all that the layer had. Its `weight` is W̃, as a `FactoredWeight`: type, shape and device are known, and
the values are computed anew each time that somebody uses them, so that they are never out of date.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from decomposable.core.tree import hollow
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.chain import in_words

_aten = torch.ops.aten
# What a tensor answers without its values: all properties but the first ones, and these functions.
_OF_VALUES = {"T", "mT", "H", "mH", "data", "real", "imag"}
_ANSWERS = {"size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "get_device"}
_ANSWERS |= {"is_floating_point", "is_complex", "is_contiguous", "__len__"}
WITHOUT_VALUES = {_aten.detach, _aten.new_empty, _aten.new_empty_strided, _aten.new_zeros, _aten.new_ones}
WITHOUT_VALUES |= {_aten.new_full, _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like}
WITHOUT_VALUES |= {_aten.rand_like, _aten.randn_like}
"""Operations on a tensor that use its type, device and shape, but not its values."""


class FactoredWeight(Tensor):
    """W̃ of a chain as a tensor without memory: any operation on it computes W̃ first. It cannot be written to."""

    stages: tuple[Tensor, ...]  # (outputs, inputs, kernel)
    swapped: bool  # whether W̃ itself is (inputs, outputs, kernel)

    @staticmethod
    def __new__(cls, stages: Sequence[Tensor], shape: Sequence[int], swapped: bool = False) -> FactoredWeight:
        """Make one without a gradient; `factored_weight` gives one that has."""
        kind = stages[0]
        weight = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=kind.dtype, device=kind.device)
        weight.stages, weight.swapped = tuple(stages), swapped
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute W̃ up here where `torch.export` records: nothing below would be recorded."""
        kwargs = kwargs or {}
        name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        asks_only = name in _ANSWERS or (name == "__get__" and getattr(owner, "__name__", "") not in _OF_VALUES)
        if torch.compiler.is_compiling() and not asks_only:
            if func in (Tensor.detach, Tensor.data.__get__):  # type: ignore[attr-defined]
                return args[0]  # a recorded program has no gradient
            args, kwargs = tree_map_only(FactoredWeight, lambda w: product(w.stages, swapped=w.swapped), (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Do the operation on W̃ itself; autograd stands above this and leads the gradient on to the factors."""
        if func.overloadpacket is _aten.detach:
            (weight,) = args
            return FactoredWeight(weight.stages, weight.shape, weight.swapped)
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
            if isinstance(value, FactoredWeight) and argument.alias_info is not None and argument.alias_info.is_write:
                raise value._refusal(func._schema.name)
        made = FactoredWeight._blank if func.overloadpacket in WITHOUT_VALUES else FactoredWeight.dense
        args, kwargs = tree_map_only(FactoredWeight, made, (args, kwargs or {}))
        return func(*args, **kwargs)

    def dense(self) -> Tensor:
        """Return W̃ as an ordinary tensor, without a gradient."""
        return product([each.detach() for each in self.stages], swapped=self.swapped)

    def _blank(self) -> Tensor:
        """Return a tensor of the same type, device and shape, whose values take no memory and say nothing."""
        return self.stages[0].new_empty(()).expand(self.shape)

    def _refusal(self, what: str) -> InvalidArgumentError:
        factors = in_words(tuple(map(len, self.stages[:-1])))
        *others, last = (f"layer[{i}].weight" for i in range(len(self.stages)))
        why = f"{what} would write to it, and it is computed from {factors}"
        return InvalidArgumentError.about("weight", what, f"writing to these, {', '.join(others)} and {last}", why=why)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise self._refusal("an assignment")

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values; torch itself offers this for plain tensors only."""
        return self.dense().requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> Any:
        """Return the values."""
        return self.dense().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain tensor: a copy has no factors to follow."""
        copied: Tensor = memo.setdefault(id(self), self.dense())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FactoredWeight(rank={', '.join(str(len(each)) for each in self.stages[:-1])}, {self.dense()!r})"


class _Product(torch.autograd.Function):
    """Lead the gradient of W̃ to the stages that it is computed from."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], swapped: bool, *stages: Tensor) -> Tensor:
        ctx.save_for_backward(*stages)
        ctx.swapped = swapped
        return FactoredWeight(stages, shape, swapped)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed, is_differentiable = ctx.needs_input_grad[2:], torch.is_grad_enabled()
        wanted = [stage for stage, is_needed in zip(ctx.saved_tensors, needed, strict=True) if is_needed]
        with torch.enable_grad():
            made = product(ctx.saved_tensors, swapped=ctx.swapped)
            found = iter(torch.autograd.grad(made, wanted, gradient, create_graph=is_differentiable))
        return None, None, *(next(found) if is_needed else None for is_needed in needed)


def product(stages: Sequence[Tensor], *, swapped: bool = False) -> Tensor:
    """Return W̃ (outputs, inputs, kernel) of the weights of a chain; swapped, its inputs come first.

    Along every axis of the kernel at most one stage is more than 1 wide, so that its taps are those of W̃.

    >>> product([torch.ones(2, 3, 1, 5), torch.ones(4, 2, 3, 1)]).shape
    torch.Size([4, 3, 3, 5])
    """
    made = stages[0]
    for stage in stages[1:]:
        made = torch.einsum("or...,ri...->oi...", stage, made)
    return (made.transpose(0, 1) if swapped else made).contiguous()


def factored_weight(stages: Sequence[Tensor], shape: Sequence[int], *, swapped: bool = False) -> Tensor:
    """Return W̃ that is computed when it is used; gradients go to the weights of the chain.

    Stages are (outputs, inputs, kernel); the shape is that of W̃, whose inputs come first where it is swapped.

    >>> first, second = torch.ones(1, 3, requires_grad=True), torch.ones(2, 1)
    >>> weight = factored_weight((first, second), (2, 3))
    >>> weight.shape, type(weight).__name__, (2 * weight).sum()
    (torch.Size([2, 3]), 'FactoredWeight', tensor(12., grad_fn=<SumBackward0>))
    """
    # Who records a graph leaves out what is not used; torch.func has tensors of its own kind.
    is_recorded = torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing()
    if is_recorded or torch._C._functorch.peek_interpreter_stack() is not None:
        return product(stages, swapped=swapped)
    if torch.compiler.is_compiling():  # by torch.export
        return FactoredWeight(stages, shape, swapped)
    weight: Tensor = _Product.apply(tuple(shape), swapped, *stages)
    return weight


class StandIn(nn.Sequential):
    """Be a chain of plain layers, input → bases → output, in the place of one convolution or `Linear`.

    Every attribute of the layer is there: sizes, options, the `bias`, what its class or its user added. It is not a
    `Conv2d` or `Linear` itself: who replaces layers of these types, to quantise them for instance, wants those inside.
    """

    __jit_unused_properties__ = ["weight", "bias"]  # noqa: RUF012  (TorchScript's convention)

    @property
    def weight(self) -> Tensor:
        """Return W̃, whose values are computed when they are used."""
        held: list[Tensor] = [layer.weight for layer in self._modules.values()]  # type: ignore[misc]
        stages = [w.transpose(0, 1) if s else w for w, s in zip(held, self._swapped, strict=True)]
        return factored_weight(stages, self._shape, swapped=any(self._swapped))

    @property
    def bias(self) -> Tensor | None:
        """Return the layer's own, which the last of the chain adds."""
        return self._modules[str(len(self._modules) - 1)].bias  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        """Return what the layer's class defines, such as a property that somebody added to it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            kind = self.__dict__.get("_stands_for", nn.Module)
            for owner in kind.__mro__ if not name.startswith("__") else ():
                if name in vars(owner):
                    value = vars(owner)[name]
                    return value.__get__(self, kind) if hasattr(value, "__get__") else value
            raise

    def __getitem__(self, index: Any) -> Any:
        """Return one of the layers; a part of them stands for nothing and is an ordinary `nn.Sequential`."""
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[index]))
        return super().__getitem__(index)


class TransposedStandIn(StandIn):
    """Be a chain for a transposed convolution, which may be told the size of its output."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Run the chain; the size is for those of its layers that are transposed convolutions."""
        for layer, is_swapped in zip(self._modules.values(), self._swapped, strict=True):
            input = layer(input, output_size) if is_swapped else layer(input)
        return input


def stand_in_for(module: nn.Module, swapped: Sequence[bool]) -> StandIn:
    """Return a chain that has all the layer's attributes, and no layers yet.

    `swapped` says of each whether it holds its weight as (inputs, outputs, kernel).
    """
    kind: type[StandIn] = TransposedStandIn if any(swapped) else StandIn
    shape = tuple(module.weight.shape)  # type: ignore[arg-type]
    return hollow(kind, module, _shape=shape, _swapped=tuple(swapped), _stands_for=type(module))
