"""Which layers are decomposed, and how the two plain layers that stand in for one of them are made."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from decomposable.core.forms import Form, first_weight, form_for, matrix_shape, second_weight
from decomposable.core.standin import StandIn, stand_in_for
from decomposable.core.tree import plain_name
from decomposable.errors import InvalidArgumentError

Decomposable = nn.Conv2d | nn.Linear
FilterFn = Callable[[nn.Module, str], bool]
_Module = TypeVar("_Module", bound=nn.Module)

_LARGE_VECTORS = 0.05  # of a model's parameters: scales and shifts that are fewer need no mention
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, eq=False)
class Layer:
    """One weight to decompose, under the name of the first layer that has it; `modules` are all that share it."""

    name: str
    modules: tuple[Decomposable, ...]
    form: Form
    shape: tuple[int, ...]

    @property
    def weight(self) -> nn.Parameter:
        """The shared weight itself, not a copy."""
        return parameter_of(self.modules[0])

    @property
    def full_rank(self) -> int:
        """The most bases that the matrix of this shape can have."""
        return min(matrix_shape(self.shape, self.form))


def parameter_of(module: Decomposable) -> nn.Parameter:
    """The module's weight as it is registered."""
    weight = module._parameters["weight"]
    assert isinstance(weight, nn.Parameter)
    return weight


def find_layers(
    model: nn.Module, form: Form, filter_fn: FilterFn | None = None
) -> tuple[tuple[Layer, ...], dict[str, str]]:
    """The layers to decompose, and for every other module with weights of its own the reason why not.

    Modules with nothing but vectors, such as normalisation layers, are named only where these are many.
    """
    skipped: dict[str, str] = {}
    sharing: dict[nn.Parameter, list[tuple[str, Decomposable]]] = defaultdict(list)
    inside_attention: set[nn.Module] = set()
    for full_name, module in model.named_modules():
        name = plain_name(full_name)
        if isinstance(module, nn.MultiheadAttention):
            skipped[name] = "packed attention weights"
            inside_attention.add(module.out_proj)
        elif isinstance(module, (*CONVOLUTIONS, nn.Linear)):
            inside = module in inside_attention
            reason = "read directly by packed attention" if inside else _why_not(module, name, filter_fn)
            if reason is None:
                assert isinstance(module, Decomposable)
                sharing[parameter_of(module)].append((name, module))
            else:
                skipped[name] = reason
    for weight, (holder, kind) in _other_holders(model, sharing).items():
        for name, _ in sharing.pop(weight):
            skipped[name] = f"weight tied to {kind} '{holder}'"
    layers = tuple(
        Layer(members[0][0], tuple(m for _, m in members), form_for(weight.shape, form), tuple(weight.shape))
        for weight, members in sharing.items()
    )
    skipped |= _other_modules(model, {*skipped, *(name for members in sharing.values() for name, _ in members)})
    return layers, in_order_of(model, skipped)


def in_order_of(model: nn.Module, skipped: dict[str, str]) -> dict[str, str]:
    """The reasons in the order of the model's modules."""
    names = (plain_name(name) for name, _ in model.named_modules())
    return {name: skipped[name] for name in names if name in skipped}


def _other_modules(model: nn.Module, known: set[str]) -> dict[str, str]:
    """Modules of other kinds that have weights of their own."""
    total = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    found = {}
    for full_name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        name = plain_name(full_name)
        if not own or name in known:
            continue
        has_matrix = any(is_lazy(p) or sum(size > 1 for size in p.shape) > 1 for p in own)
        if has_matrix or sum(p.numel() for p in own) >= _LARGE_VECTORS * total:
            found[name] = f"{type(module).__name__}: only Conv2d and Linear are decomposed"
    return found


def require_layers(layers: tuple[Layer, ...], skipped: dict[str, str]) -> None:
    """Raise where nothing is left to decompose, saying why."""
    if not layers:
        reasons = "; ".join(f"'{name}': {reason}" for name, reason in list(skipped.items())[:3])
        raise InvalidArgumentError(
            f"model: it has no layer to decompose ({reasons or 'no Conv2d or Linear'}); "
            "allowed: at least one Conv2d with groups=1 or one Linear"
        )


def _why_not(module: nn.Module, name: str, filter_fn: FilterFn | None) -> str | None:
    """The reason to leave a convolution or linear layer alone, or None."""
    groups = getattr(module, "groups", 1)
    if getattr(module, "transposed", False):
        return "transposed convolution"
    if groups > 1:
        return "depthwise convolution" if groups == module.in_channels else f"grouped convolution (groups={groups})"
    if not isinstance(module, Decomposable):
        return f"{type(module).__name__}: only Conv2d and Linear are decomposed"
    if isinstance(module.weight, nn.parameter.UninitializedParameter):
        return "lazy layer that has seen no input yet"
    if is_parametrized(module) or "weight" not in module._parameters:
        return "its weight is computed (parametrization, weight or spectral norm); remove that first"
    plain = nn.Linear if isinstance(module, nn.Linear) else nn.Conv2d
    methods = ["forward"] if plain is nn.Linear else ["forward", "_conv_forward"]
    is_patched = any(method in vars(module) for method in methods)
    if is_patched or any(getattr(type(module), method) is not getattr(plain, method) for method in methods):
        return f"{type(module).__name__} has a forward of its own"
    more = {*module._parameters, *module._buffers, *module._modules} - {"weight", "bias"}
    if more:
        return f"it holds more than weight and bias ('{min(more)}')"
    if module.weight.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"weight of dtype {module.weight.dtype}"
    if module.weight.numel() == 0:
        return "empty weight"
    return "rejected by filter_fn" if filter_fn is not None and not filter_fn(module, name) else None


def _other_holders(
    model: nn.Module, sharing: dict[nn.Parameter, list[tuple[str, Decomposable]]]
) -> dict[nn.Parameter, tuple[str, str]]:
    """Weights that a module outside `sharing` holds too, such as an embedding or a layer that is left alone."""
    found = {}
    for full_name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter in sharing and all(module is not m for _, m in sharing[parameter]):
                kind = "embedding" if isinstance(module, nn.Embedding | nn.EmbeddingBag) else type(module).__name__
                found[parameter] = (plain_name(full_name), kind)
    return found


@dataclass(frozen=True, eq=False)
class TwoFactors:
    """The two plain layers, input → R bases → output, that a layer becomes; `build` gives them their weights."""

    module: Decomposable
    form: Form

    def __post_init__(self) -> None:
        module = self.module
        shells = _linear_shells(module) if isinstance(module, nn.Linear) else _conv_shells(module, self.form)
        object.__setattr__(self, "_shells", (stand_in_for(module, self.form), *shells))

    def build(self, first: Tensor, second: Tensor) -> StandIn:
        """The pair with these weights, which are used as they are: parameters, views or results of a computation."""
        around, reduce, expand = self._shells  # type: ignore[attr-defined]
        rank, bias = first.shape[0], self.module.bias
        out_name, in_name = ("out_features", "in_features") if first.dim() == 2 else ("out_channels", "in_channels")
        pair: StandIn = _copied(around, training=self.module.training)
        pair._modules["0"] = _with_weight(reduce, first, None, **{out_name: rank}, training=pair.training)
        pair._modules["1"] = _with_weight(expand, second, bias, **{in_name: rank}, training=pair.training)
        return pair

    def from_factors(
        self, p_MR: Tensor, q_RN: Tensor, memory_format: torch.memory_format = torch.contiguous_format
    ) -> StandIn:
        """The pair for W̃ = P Q, its weights laid out as asked for."""
        shape = self.module.weight.shape
        weights = first_weight(p_MR, shape, self.form), second_weight(q_RN, shape, self.form)
        return self.build(*(laid_out(weight, memory_format) for weight in weights))


def laid_out(weight: Tensor, memory_format: torch.memory_format) -> Tensor:
    """The weight in this layout, which decides that of the layer's output too; matrices have only one."""
    return weight.contiguous(memory_format=memory_format if weight.dim() == 4 else torch.contiguous_format)


def _linear_shells(linear: nn.Linear) -> tuple[nn.Linear, nn.Linear]:
    first = nn.Linear(linear.in_features, 1, bias=False, device="meta")
    return first, nn.Linear(1, linear.out_features, bias=linear.bias is not None, device="meta")


def _conv_shells(conv: nn.Conv2d, form: Form) -> tuple[nn.Conv2d, nn.Conv2d]:
    """Split the geometry: everything in the first for the channel form, x in the first and y in the second for spatial.

    Zero, reflecting, replicating and circular padding act on each axis alone, so they split exactly, too.
    """

    def shell(channels: tuple[int, int], axes: tuple[bool, bool], bias: bool) -> nn.Conv2d:
        def along(values: tuple[int, ...], otherwise: int) -> tuple[int, int]:
            y, x = (v if use else otherwise for v, use in zip(values, axes, strict=True))
            return y, x

        return nn.Conv2d(
            *channels,
            kernel_size=along(conv.kernel_size, 1),
            stride=along(conv.stride, 1),
            padding=conv.padding if isinstance(conv.padding, str) else along(conv.padding, 0),
            dilation=along(conv.dilation, 1),
            bias=bias,
            padding_mode=conv.padding_mode,
            device="meta",
        )

    first_axes, second_axes = ((False, True), (True, False)) if form == "spatial" else ((True, True), (False, False))
    has_bias = conv.bias is not None
    return shell((conv.in_channels, 1), first_axes, False), shell((1, conv.out_channels), second_axes, has_bias)


def _copied(shell: _Module, **changed: Any) -> _Module:
    """A copy, with containers of its own, made from its attributes: a constructor would take ten times as long."""
    module = object.__new__(type(shell))
    own = {name: value.copy() for name, value in vars(shell).items() if type(value) in (dict, OrderedDict, set)}
    module.__dict__.update(vars(shell), **own, **changed)
    return module


def _with_weight(shell: nn.Module, weight: Tensor, bias: Tensor | None, **changed: Any) -> nn.Module:
    module = _copied(shell, **changed)
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
