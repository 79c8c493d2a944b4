"""One forward pass that sees how often every weight is applied, for the formulas of `cost.py`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

from decomposable.core.layers import CONVOLUTIONS, Layer
from decomposable.core.products import Products
from decomposable.core.tree import evaluating, plain_name
from decomposable.core.unpacking import Opened
from decomposable.core.uses import Uses
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.chain import Chain
from decomposable_edge.sizing.cost import LayerCost, LayerShape, per_rank

Forward = Callable[[nn.Module, Any], Any]
Extents = tuple[int, ...]
"""The sizes of a feature map along the axes of the kernel; of a linear layer there are none."""

_WITHOUT_COST = (nn.Embedding, nn.EmbeddingBag, _NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU)


def call_with_first(net: nn.Module, batch: Any, name: str = "batch") -> Any:
    """Call `net` with a batch: a tensor, or a tuple, list or dict whose first entry is the input.

    `name` is what messages call the batch.
    """
    try:
        return net(first_entry(batch))
    except Exception as error:
        advice = _advice(batch, error)
        if advice is None:
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InvalidArgumentError(
            f"{name}: {advice[0]}; its first entry alone was passed and the model refused it ({reason:.300}); "
            f"allowed: forward=lambda net, batch: {advice[1]}"
        ) from error


def _advice(batch: Any, error: Exception) -> tuple[str, str] | None:
    """What a batch is of which the model wants more than the first entry, and how it is called with all."""
    if isinstance(batch, Mapping) and len(batch) > 1:
        return f"a dict of {', '.join(map(str, batch))}", "net(**batch)"
    is_missing = isinstance(error, TypeError) and "missing" in str(error)
    if isinstance(batch, tuple | list) and len(batch) > 1 and is_missing:
        return f"a {type(batch).__name__} of {len(batch)} entries", "net(*batch)"
    return None


def first_entry(batch: Any) -> Any:
    """The input in a batch.

    >>> first_entry((1, 2)), first_entry({"image": 3, "label": 4}), first_entry(5)
    (1, 3, 5)
    """
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    return batch[0] if isinstance(batch, tuple | list) else batch


def on_device_of(module: nn.Module, batch: Any) -> Any:
    """The batch where the module's weights are."""
    tensor = next(module.parameters(), None)
    if tensor is None:
        return batch
    return map_entries(lambda value, _: value.to(tensor.device) if isinstance(value, Tensor) else value, batch)


Entry = tuple[str | int, ...]
"""Where in a batch something lies: keys and places, from the outside in."""


def map_entries(function: Callable[[Any, Entry], Any], batch: Any, entry: Entry = ()) -> Any:
    """The batch with each of its entries replaced by ``function(value, where it lies)``.

    >>> map_entries(lambda value, entry: (value, entry), {"a": [1, 2]})
    {'a': [(1, ('a', 0)), (2, ('a', 1))]}
    """
    if isinstance(batch, Mapping):
        return {key: map_entries(function, value, (*entry, key)) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        made = [map_entries(function, value, (*entry, i)) for i, value in enumerate(batch)]
        return type(batch)(*made) if hasattr(batch, "_fields") else type(batch)(made)
    return function(batch, entry)


@dataclass
class Trace:
    """What a pass showed: the positions over all calls of every layer's output map; the extents of its input and output
    maps, with the number of such maps; by module the MACs of other weights, and those of products of two activations;
    for every normalisation layer the layer whose output goes straight into it; and the layers whose outputs go nowhere
    else.
    """

    outputs: Counter[nn.Module] = field(default_factory=Counter)
    maps: dict[nn.Module, Counter[tuple[Extents, Extents]]] = field(default_factory=lambda: defaultdict(Counter))
    other_macs: Counter[nn.Module] = field(default_factory=Counter)
    products: Counter[nn.Module] = field(default_factory=Counter)
    layer_before_norm: dict[nn.Module, nn.Module] = field(default_factory=dict)
    only_normalised: set[nn.Module] = field(default_factory=set)
    samples: int = 1
    has_unbatched: bool = False

    def positions(self, layer: Layer, chain: Chain) -> list[int]:
        """Where a chain in the layer's place applies the weight of every stage, over all calls of all its modules."""
        totals = [0] * len(chain.stages)
        for module in layer.modules:
            for (inputs, outputs), count in self.maps.get(module, {}).items():
                applied = chain.applied(inputs, outputs)
                totals = [total + count * each for total, each in zip(totals, applied, strict=True)]
        return totals

    def per_sample(self, total: int) -> int:
        """A count over the whole batch, for one of its samples."""
        return round(total / self.samples)


@torch.no_grad()
def trace(model: nn.Module, example_input: Any, forward: Forward = call_with_first) -> Trace:
    """Run the model once, in eval mode, and record how often each convolution, linear, attention and recurrent layer
    applies its weights. Training flags are as before afterwards.
    """
    first = first_entry(example_input)
    seen = Trace(samples=max(1, len(first)) if isinstance(first, Tensor) and first.dim() > 1 else 1)
    outputs: list[tuple[nn.Module, Any, int]] = []  # held, so that no two of them can share an address
    products, uses = Products(model), Uses()
    with ExitStack() as hooks, evaluating(model):
        for module in model.modules():
            for hook in _noting(products, module):
                hooks.callback(hook.remove)
            see = next((see for kinds, see in _SEEING.items() if isinstance(module, kinds)), None)
            if see is not None:
                hook = module.register_forward_hook(lambda m, a, k, y, see=see: see(seen, m, a, k, y), with_kwargs=True)
                hooks.callback(hook.remove)
                hook = module.register_forward_hook(lambda m, a, y: outputs.append((m, y, _version(y))))
                hooks.callback(hook.remove)
                hooks.callback(module.register_forward_hook(lambda m, a, y: uses.made(m, y)).remove)
            elif isinstance(module, _BatchNorm):
                hook = module.register_forward_pre_hook(lambda m, a: _see_norm(seen, m, a, outputs))
                hooks.callback(hook.remove)
                hooks.callback(module.register_forward_pre_hook(lambda *_: uses.enter()).remove)
                hooks.callback(module.register_forward_hook(lambda *_: uses.leave(), always_call=True).remove)
        with products, uses:
            returned = forward(model, example_input)
    seen.only_normalised = uses.only_normalised(returned)
    seen.products += products.macs
    if seen.has_unbatched:
        seen.samples = 1
    return seen


def _noting(products: Products, module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Hooks that tell which module runs."""
    counted = isinstance(module, (*CONVOLUTIONS, nn.Linear, nn.RNNBase, nn.MultiheadAttention))
    return (
        module.register_forward_pre_hook(lambda m, _: products.enter(m, counted)),
        module.register_forward_hook(lambda *_: products.leave(), always_call=True),
    )


def _version(output: Any) -> int:
    """How often a tensor was changed in place; inference tensors do not say."""
    return output._version if isinstance(output, Tensor) and not output.is_inference() else 0


def _see_norm(seen: Trace, norm: nn.Module, args: Any, outputs: list[tuple[nn.Module, Any, int]]) -> None:
    for layer, output, version in outputs:
        if args and output is args[0] and _version(output) == version:  # else changed in place since
            seen.layer_before_norm[norm] = layer


def _see_convolution(seen: Trace, conv: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
    inputs = args[0] if args else kwargs["input"]
    axes = len(conv.kernel_size)  # type: ignore[arg-type]
    seen.has_unbatched |= inputs.dim() == axes + 1
    batch = inputs.shape[: inputs.dim() - axes - 1].numel()
    grid = inputs if getattr(conv, "transposed", False) else output  # a transposed weight is applied at every input
    seen.outputs[conv] += batch * grid.shape[-axes:].numel()
    seen.maps[conv][tuple(inputs.shape[-axes:]), tuple(output.shape[-axes:])] += batch


def _see_linear(seen: Trace, linear: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
    seen.outputs[linear] += output.shape[:-1].numel()
    seen.maps[linear][(), ()] += output.shape[:-1].numel()


def _see_attention(seen: Trace, attention: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    assert isinstance(attention, nn.MultiheadAttention)
    query, key, value = (args[i] if i < len(args) else kwargs[name] for i, name in enumerate(("query", "key", "value")))
    width = attention.embed_dim
    seen.has_unbatched |= query.dim() == 2
    if not attention.batch_first and query.dim() == 3:
        seen.samples = query.shape[1]
    seen.other_macs[attention] += sum(each.numel() * width for each in (query, key, value))  # positions · in · out
    # What PyTorch does inside in one piece: scores and their sum over the values, for all heads together.
    keys = key.numel() // key.shape[-1] // _samples(attention, query) + (attention.bias_k is not None)
    seen.products[attention] += query.numel() // width * (keys + attention.add_zero_attn) * 2 * width
    # out_proj is never called as a module: its weight is used at the query's positions.
    seen.outputs[attention.out_proj] += query.numel() // width


def _samples(attention: nn.MultiheadAttention, query: Tensor) -> int:
    return 1 if query.dim() == 2 else query.shape[0 if attention.batch_first else 1]


def _see_recurrent(seen: Trace, recurrent: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    inputs = args[0] if args else kwargs["input"]
    data = inputs.data if isinstance(inputs, nn.utils.rnn.PackedSequence) else inputs
    seen.has_unbatched |= data is inputs and inputs.dim() == 2
    if not recurrent.batch_first and data is inputs and inputs.dim() == 3:
        seen.samples = inputs.shape[1]
    weights = sum(p.numel() for name, p in recurrent.named_parameters(recurse=False) if name.startswith("weight"))
    seen.other_macs[recurrent] += weights * data.shape[:-1].numel()


def _see_opened(seen: Trace, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Its layers are seen themselves; what they cannot tell is where the batch is, which may not be the first axis."""
    inputs = args[0] if args else kwargs.get("query", kwargs.get("input"))
    seen.has_unbatched |= isinstance(inputs, Tensor) and inputs.dim() == 2
    if isinstance(inputs, Tensor) and inputs.dim() == 3 and not module.batch_first:
        seen.samples = inputs.shape[1]


_SEEING: dict[Any, Callable[..., None]] = {
    Opened: _see_opened,
    CONVOLUTIONS: _see_convolution,
    nn.Linear: _see_linear,
    nn.MultiheadAttention: _see_attention,
    nn.RNNBase: _see_recurrent,
}


def shape_of(layer: Layer) -> LayerShape:
    """The layer without its values."""
    chain = layer.chain
    return LayerShape(
        name=layer.name, form=layer.form, shape=layer.shape, stages=chain.stages, transposed=chain.transposed
    )


def layer_costs(layers: Sequence[Layer], seen: Trace) -> tuple[LayerCost, ...]:
    """The cost of every decomposed layer; its MACs are 0 where the pass did not reach it."""
    costs = []
    for layer in layers:
        shape, chain = shape_of(layer), layer.chain
        outputs = sum(seen.outputs[m] for m in layer.modules)
        each = per_rank([s * p for s, p in zip(chain.sizes, seen.positions(layer, chain), strict=True)])
        macs = tuple(map(seen.per_sample, each)) if isinstance(each, tuple) else seen.per_sample(each)
        dense_macs = seen.per_sample(chain.dense_size * outputs)
        costs.append(LayerCost.of(shape, dense_macs=dense_macs, macs_per_rank=macs))
    return tuple(costs)


def other_macs(layers: Sequence[Layer], seen: Trace) -> int:
    """MACs of everything that is not decomposed, the products of activations among it."""
    decomposed = {module for layer in layers for module in layer.modules}
    left = sum(macs for module, macs in macs_left_alone(seen).items() if module not in decomposed)
    return seen.per_sample(left + seen.products.total())


def macs_left_alone(seen: Trace) -> Counter[nn.Module]:
    """By module, the MACs of its own weights as they are, for the whole batch."""
    macs = seen.other_macs.copy()
    for module, positions in seen.outputs.items():
        with evaluating(module):  # one that is computed may change by being asked for, in training
            assert isinstance(module.weight, Tensor)
            macs[module] += module.weight.numel() * positions
    return macs


def not_counted(model: nn.Module, seen: Trace) -> dict[str, str]:
    """Modules that hold parameters of their own which no formula here counts, with their type."""
    counted = {*seen.outputs, *seen.other_macs}
    return {
        plain_name(name): type(module).__name__
        for name, module in model.named_modules()
        if module not in counted
        and not isinstance(module, _WITHOUT_COST)
        and any(p is not None for p in module._parameters.values())
    }
