"""Which layers are decomposed, and making the chain of plain layers that stands in for one of them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from decomposable.core.forms import (
    TAKEN,
    Decomposition,
    FormOf,
    MatrixForm,
    Tucker,
    check_patterns,
    form_for,
    form_named,
)
from decomposable.core.standin import StandIn, stand_in_for
from decomposable.core.tree import plain_name
from decomposable.core.unpacking import why_closed
from decomposable.core.unpacking.calling import has_own_forward, may_call
from decomposable.core.unpacking.computed import COMPUTED, is_computed
from decomposable.core.unpacking.parts import WHOLE, ParameterSlice, ViewLinear
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.chain import Axes, Chain, Rank, Ranks

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Decomposable = Convolution | Transposed | nn.Linear
KINDS: Mapping[int, type[Decomposable]] = {0: nn.Linear, 1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
"""The layers that are decomposed, by the number of axes that their kernel has."""
FilterFn = Callable[[nn.Module, str], bool]
TRANSPOSED: Mapping[int, type[Transposed]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
"""The same of transposed convolutions."""
_Module = TypeVar("_Module", bound=nn.Module)

REJECTED = "rejected by filter_fn"
_LARGE_VECTORS = 0.05  # of a model's parameters: scales and shifts that are fewer need no mention
_KINDS = "convolutions and Linear"
_SWAPPED = ParameterSlice(transposed=True)  # (inputs, outputs, kernel), as a transposed convolution holds its weight
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, eq=False)
class Layer:
    """One weight to decompose, under the name of the first layer that has it; `modules` are all that share it."""

    name: str
    modules: tuple[Decomposable, ...]
    form: str
    shape: tuple[int, ...]
    chain: Chain  # of plain layers, that it becomes

    @property
    def numerics(self) -> MatrixForm | Tucker:
        """Return how its weight becomes the chain's."""
        return TAKEN[self.form]

    @property
    def weight(self) -> Tensor:
        """Return the shared weight itself (outputs, inputs, kernel): a parameter, or a view of one, but no copy."""
        return self.cut.of(self.parameter)

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter that the weight is, or is a part of."""
        return source_of(self.modules[0])[0]

    @property
    def cut(self) -> ParameterSlice:
        """Return which part of the parameter the weight is."""
        return source_of(self.modules[0])[1]

    @property
    def full_rank(self) -> Rank:
        """Return the most bases that a weight of this shape can have."""
        return self.chain.full_rank

    @property
    def full_ranks(self) -> Ranks:
        """Return the same, a number for every cut."""
        return self.chain.full_ranks


Source = tuple[nn.Parameter, ParameterSlice]
"""A parameter, and which part of it a weight is."""


def source_of(module: Decomposable) -> Source:
    """Return where the module's weight is registered."""
    if isinstance(module, ViewLinear):
        return module.part.parameter, module.part.cut
    weight = module._parameters["weight"]
    assert isinstance(weight, nn.Parameter)
    return weight, _SWAPPED if isinstance(module, Transposed) else WHOLE


def find_layers(
    model: nn.Module, form: FormOf, filter_fn: FilterFn | None = None
) -> tuple[tuple[Layer, ...], dict[str, str]]:
    """Return the layers to decompose, and for every other module with weights of its own the reason why not.

    Modules with nothing but vectors, such as normalisation layers, are named only where these are many.
    """
    skipped: dict[str, str] = {}
    sharing: dict[Source, list[tuple[str, Decomposable]]] = defaultdict(list)
    inside_attention: set[nn.Module] = set()
    for full_name, module in model.named_modules():
        name, reason = plain_name(full_name), why_closed(module)
        if isinstance(module, nn.MultiheadAttention):
            reason = reason or "packed attention weights"
            inside_attention.add(module.out_proj)
        elif reason is None and isinstance(module, (*CONVOLUTIONS, nn.Linear)):
            inside = module in inside_attention
            reason = "read directly by packed attention" if inside else _why_not(module, name, filter_fn)
            if reason is None:
                assert isinstance(module, Decomposable)
                sharing[source_of(module)].append((name, module))
        if reason is not None:
            skipped[name] = reason
    for source, (holder, kind) in _other_holders(model, sharing).items():
        for name, _ in sharing.pop(source):
            skipped[name] = f"weight tied to {kind} '{holder}'"
    found = [name for members in sharing.values() for name, _ in members]
    check_patterns(form, found)
    skipped |= _other_modules(model, {*skipped, *found})
    return tuple(_layer(members, form) for members in sharing.values()), in_order_of(model, skipped)


def _layer(members: list[tuple[str, Decomposable]], form: FormOf) -> Layer:
    """Return the layer of these modules; the form is that of the first one's name."""
    names, modules = zip(*members, strict=True)
    parameter, cut = source_of(modules[0])
    shape, transposed = tuple(cut.of(parameter).shape), isinstance(modules[0], Transposed)
    taken = form_for(shape, form_named(form, names[0]), transposed=transposed)
    return Layer(names[0], modules, taken, shape, TAKEN[taken].chain(shape, transposed=transposed))


def decomposed(layers: Sequence[Layer]) -> dict[str, Decomposition]:
    """Return the bases of all layers' weights, by name; those of one form are computed together."""
    found: dict[str, Decomposition] = {}
    for form in dict.fromkeys(layer.form for layer in layers):
        found |= TAKEN[form].decompose({x.name: x.weight.detach() for x in layers if x.form == form})
    return {layer.name: found[layer.name] for layer in layers}


def without_transposed(filter_fn: FilterFn | None = None) -> FilterFn:
    """Return a filter for who knows nothing of transposed convolutions."""
    return lambda module, name: not isinstance(module, Transposed) and (filter_fn is None or filter_fn(module, name))


def in_order_of(model: nn.Module, skipped: dict[str, str]) -> dict[str, str]:
    """Return the reasons in the order of the model's modules."""
    names = (plain_name(name) for name, _ in model.named_modules())
    return {name: skipped[name] for name in names if name in skipped}


def _other_modules(model: nn.Module, known: set[str]) -> dict[str, str]:
    """Return modules of other kinds that have weights of their own, with a reason."""
    total = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    found = {}
    for full_name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        has_matrix = any(is_lazy(p) or sum(size > 1 for size in p.shape) > 1 for p in own)
        is_large = has_matrix or (own and sum(p.numel() for p in own) >= _LARGE_VECTORS * total)
        if is_large and plain_name(full_name) not in known:
            found[plain_name(full_name)] = f"{type(module).__name__}: only {_KINDS} are decomposed"
    return found


def require_layers(layers: tuple[Layer, ...], skipped: dict[str, str]) -> None:
    """Raise where nothing is left to decompose, saying why."""
    if not layers:
        reasons = "; ".join(f"'{name}': {reason}" for name, reason in list(skipped.items())[:3])
        why = f"it has no layer to decompose ({reasons or 'no convolution or Linear'})"
        allowed = "at least one convolution with groups=1 or one Linear"
        raise InvalidArgumentError.about("model", dict(skipped), allowed, why=why)


def _why_not(module: nn.Module, name: str, filter_fn: FilterFn | None) -> str | None:
    """Return the reason to leave a convolution or linear layer alone, or None."""
    groups = getattr(module, "groups", 1)
    if groups > 1:
        return "depthwise convolution" if groups == module.in_channels else f"grouped convolution (groups={groups})"
    if not isinstance(module, Decomposable):
        return f"{type(module).__name__}: only {_KINDS} are decomposed"
    if is_computed(module):  # and not settled; asking for it may change it, as of a spectral norm in training
        is_wanted = filter_fn is None or filter_fn(module, name)
        return f"{COMPUTED}: only decompose() takes it, unless others share it" if is_wanted else REJECTED
    if is_parametrized(module) or not ("weight" in module._parameters or isinstance(module, ViewLinear)):
        return f"{COMPUTED}; remove that first"
    if is_lazy(module.weight):
        return "lazy layer that has seen no input yet"
    if has_own_forward(module):
        may_be_seen = "; only decompose() looks into it" if may_call(module) else ""
        return f"{type(module).__name__} has a forward of its own{may_be_seen}"
    more = {*module._parameters, *module._buffers, *module._modules} - {"weight", "bias"}
    if more:
        return f"it holds more than weight and bias ('{min(more)}')"
    if module.weight.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"weight of dtype {module.weight.dtype}"
    if module.weight.numel() == 0:
        return "empty weight"
    return REJECTED if filter_fn is not None and not filter_fn(module, name) else None


def _other_holders(
    model: nn.Module, sharing: dict[Source, list[tuple[str, Decomposable]]]
) -> dict[Source, tuple[str, str]]:
    """Return weights that a module outside `sharing` holds too, such as an embedding or a layer that is left alone."""
    sources: dict[nn.Parameter | None, list[Source]] = defaultdict(list)
    for source in sharing:
        sources[source[0]].append(source)
    found = {}
    for full_name, module in model.named_modules():
        for parameter in module._parameters.values():
            for source in sources.get(parameter, ()):
                if all(module is not m for _, m in sharing[source]):
                    kind = "embedding" if isinstance(module, nn.Embedding | nn.EmbeddingBag) else type(module).__name__
                    found[source] = (plain_name(full_name), kind)
    return found


class ChainLayers:
    """Make the chain of plain layers, input → r₁ bases → … → output, that a layer becomes."""

    def __init__(self, module: Decomposable, chain: Chain) -> None:
        if isinstance(module, Transposed) != chain.transposed:
            raise AssertionError(f"{type(module).__name__} has no such chain")
        self.module, self.chain = module, chain
        last = len(chain.stages) - 1
        self._around = stand_in_for(module, chain.swapped)
        self._shells = [
            _shell(module, axes, has_bias=i == last and module.bias is not None) for i, axes in enumerate(chain.stages)
        ]

    def build(self, *weights: Tensor) -> StandIn:
        """Return the chain with these weights, as its layers hold them: parameters, views, or results."""
        made = _copied(self._around, training=self.module.training)
        last = len(weights) - 1
        for i, (shell, weight) in enumerate(zip(self._shells, weights, strict=True)):
            bias = self.module.bias if i == last else None
            made._modules[str(i)] = _with_weight(shell, weight, bias, training=made.training)
        return made

    def dense(self, weight: Tensor) -> nn.Module:
        """Return the layer itself with another weight."""
        return _with_weight(self.module, weight, self.module.bias, training=self.module.training)


def laid_out(weight: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return the weight in this layout, which decides that of the layer's output too; matrices have only one."""
    if weight.dim() != 4 or memory_format != torch.channels_last:
        return in_order(weight)
    # Strides of its own: where a size is 1 `contiguous` keeps those of the other layout, by which torch then goes.
    w_OHWI = weight.permute(0, 2, 3, 1)
    return w_OHWI.flatten().view(w_OHWI.shape).permute(0, 3, 1, 2)


def in_order(weight: Tensor) -> Tensor:
    """Return the weight with the usual strides, also where a size is 1: what is equal is written to a file alike."""
    plain = weight.contiguous()
    return plain if plain.dim() < 3 and plain.shape[-1] > 1 else plain.flatten().view(plain.shape)


def _shell(module: Decomposable, axes: Axes, has_bias: bool) -> Decomposable:
    """Return a layer of a chain without its weight: it has the geometry of its axes, and none along all others.

    Zero, reflecting, replicating and circular padding act on each axis alone, so they split exactly, too.
    """
    if isinstance(module, nn.Linear):
        return nn.Linear(1, 1, bias=has_bias, device="meta")
    is_transposed = isinstance(module, Transposed) and any(axes)
    options: dict[str, Any] = {"padding_mode": module.padding_mode, "bias": has_bias, "device": "meta"}
    nothing = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}
    for name, otherwise in [*nothing.items(), *([("output_padding", 0)] if is_transposed else [])]:
        values = getattr(module, name)
        if not isinstance(values, str):
            values = tuple(value if own else otherwise for value, own in zip(values, axes, strict=True))
        options[name] = values
    return (TRANSPOSED if is_transposed else KINDS)[len(axes)](1, 1, **options)


def _copied(shell: _Module, **changed: Any) -> _Module:
    """Return a copy with containers of its own, made of its attributes: a constructor takes ten times as long."""
    module = object.__new__(type(shell))
    own = {name: value.copy() for name, value in vars(shell).items() if type(value) in (dict, OrderedDict, set)}
    module.__dict__.update(vars(shell), **own, **changed)
    return module


def _with_weight(shell: nn.Module, weight: Tensor, bias: Tensor | None, training: bool) -> nn.Module:
    outputs, inputs = ("out_features", "in_features") if weight.dim() == 2 else ("out_channels", "in_channels")
    if isinstance(shell, Transposed):
        outputs, inputs = inputs, outputs
    module = _copied(shell, training=training, **{outputs: weight.shape[0], inputs: weight.shape[1]})
    module._parameters["bias"] = cast(nn.Parameter | None, bias)
    if isinstance(weight, nn.Parameter):
        module._parameters["weight"] = weight
    else:
        del module._parameters["weight"]
        module.__dict__["weight"] = weight
    return module


def avoid_fast_paths_(root: nn.Module) -> None:
    """Keep transformer layers from reading weights past the layers that hold them, as they do in eval mode."""
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
