"""One forward pass that sees how often every weight is applied, for the formulas of `cost.py`.

It also sees, below all of PyTorch's functions:

- products of two activations, as inside attention (q kᵀ and weights · v), which no size makes smaller: neither side is
  a parameter or a buffer, and no layer runs that is counted by its weight;
- what the outputs of layers go into. Batch normalisation takes the mean of its input away. A cut before it may lose
  that mean, unless somebody else uses it: a shortcut, a second call, or whoever gets the network's outputs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decomposable.core.layers import CONVOLUTIONS, Layer
from decomposable.core.tree import evaluating, plain_name
from decomposable.core.unpacking.parts import Opened
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.chain import Chain
from decomposable_edge.sizing.cost import LayerCost, LayerShape, per_rank

Forward = Callable[[nn.Module, Any], Any]
Extents = tuple[int, ...]
"""The sizes of a feature map along the axes of the kernel; of a linear layer there are none."""

_COUNTED = (*CONVOLUTIONS, nn.Linear, nn.RNNBase, nn.MultiheadAttention)  # by their weights
_aten = torch.ops.aten
_FACTORS = {_aten.mm: (0, 1), _aten.bmm: (0, 1), _aten.addmm: (1, 2), _aten.baddbmm: (1, 2)}  # where the two sides are
_ATTENTION = "_scaled_dot_product"  # how the kernels of attention begin, whichever of them a machine takes
_WITHOUT_COST = (nn.Embedding, nn.EmbeddingBag, _NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU)


def call_with_first(net: nn.Module, batch: Any, name: str = "batch") -> Any:
    """Call `net` with a batch, called `name` in messages: a tensor, or a collection whose first entry is the input."""
    try:
        return net(first_entry(batch))
    except Exception as error:
        is_missing = isinstance(error, TypeError) and "missing" in str(error)
        if isinstance(batch, Mapping) and len(batch) > 1:
            came, call = f"a dict of {', '.join(map(str, batch))}", "net(**batch)"
        elif isinstance(batch, tuple | list) and len(batch) > 1 and is_missing:
            came, call = f"a {type(batch).__name__} of {len(batch)} entries", "net(*batch)"
        else:
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        why = f"{came}; its first entry alone was passed, and the model refused it ({reason:.300})"
        raise InvalidArgumentError.about(name, came, f"forward=lambda net, batch: {call}", why=why) from error


def first_entry(batch: Any) -> Any:
    """Return the input in a batch.

    >>> first_entry((1, 2)), first_entry({"image": 3, "label": 4}), first_entry(5)
    (1, 3, 5)
    """
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    return batch[0] if isinstance(batch, tuple | list) else batch


def on_device_of(module: nn.Module, batch: Any) -> Any:
    """Return the batch where the module's weights are."""
    tensor = next(module.parameters(), None)
    if tensor is None:
        return batch
    return map_entries(lambda value, _: value.to(tensor.device) if isinstance(value, Tensor) else value, batch)


Entry = tuple[str | int, ...]
"""Where in a batch something lies: keys and places, from the outside in."""


def map_entries(function: Callable[[Any, Entry], Any], batch: Any, entry: Entry = ()) -> Any:
    """Return the batch with each of its entries replaced by ``function(value, where it lies)``.

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
    """Hold what a pass showed.

    Attributes:
        outputs: by layer the positions of its output map, over all calls.
        maps: by layer the extents of its input and output maps, with the number of such maps.
        other_macs: by module the MACs of its other weights.
        products: by module the MACs of products of two activations.
        layer_before_norm: for every normalisation layer the layer whose output goes straight into it.
        only_normalised: the layers whose outputs go nowhere else.
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
        """Return where a chain in the layer's place applies the weight of every stage, over all its calls."""
        totals = [0] * len(chain.stages)
        for module in layer.modules:
            for (inputs, outputs), count in self.maps.get(module, {}).items():
                applied = chain.applied(inputs, outputs)
                totals = [total + count * each for total, each in zip(totals, applied, strict=True)]
        return totals

    def per_sample(self, total: int) -> int:
        """Return a count over the whole batch, for one of its samples."""
        return round(total / self.samples)


@torch.no_grad()
def trace(model: nn.Module, example_input: Any, forward: Forward = call_with_first) -> Trace:
    """Run the model once, in eval mode, and return how often each layer applies its weights.

    Those are convolutions, linear, attention and recurrent layers. Training flags are as before afterwards.
    """
    first = first_entry(example_input)
    seen = Trace(samples=max(1, len(first)) if isinstance(first, Tensor) and first.dim() > 1 else 1)
    watcher = _Watcher(model, seen)
    with ExitStack() as hooks, evaluating(model):
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(watcher.enter).remove)
            see = next((see for kinds, see in _SEEING.items() if isinstance(module, kinds)), None)
            if see is not None:
                hook = module.register_forward_hook(lambda m, a, k, y, see=see: see(seen, m, a, k, y), with_kwargs=True)
                hooks.callback(hook.remove)
                hooks.callback(module.register_forward_hook(watcher.made).remove)
            hooks.callback(module.register_forward_hook(watcher.leave, always_call=True).remove)
        with watcher:
            returned = forward(model, example_input)
    seen.only_normalised = watcher.only_normalised(returned)
    seen.samples = 1 if seen.has_unbatched else seen.samples
    return seen


class _Watcher(TorchDispatchMode):
    """See products of activations, by the module that computes them, and uses of outputs."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `probing.py`

    def __init__(self, model: nn.Module, seen: Trace) -> None:
        super().__init__()
        self._seen = seen
        held = (t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()))
        self._held = {_place(t) for t in held if t is not None}
        self._running: list[nn.Module] = [model]
        self._norms = 0  # normalisation layers that run
        # Outputs are held, so that no two of them can share an address; with how often each was changed in place.
        self._made: dict[int, tuple[nn.Module, Tensor, int]] = {}
        self._normalised: set[int] = set()
        self._used_elsewhere: set[int] = set()

    def enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)
        if isinstance(module, _BatchNorm):
            self._norms += 1
            layer, output, version = self._made.get(id(args[0]) if args else 0, (None, None, 0))
            if layer is not None and _version(output) == version:  # else changed in place since
                self._seen.layer_before_norm[module] = layer

    def leave(self, module: nn.Module, *_: Any) -> None:
        self._running.pop()
        self._norms -= isinstance(module, _BatchNorm)

    def made(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            first = self._made.get(id(output), (module,))[0]
            self._made[id(output)] = (first, output, _version(output))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        used = {id(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)} & self._made.keys()
        (self._normalised if self._norms else self._used_elsewhere).update(used)
        macs = self._product_macs(getattr(func, "overloadpacket", None), args)
        if macs and not isinstance(self._running[-1], _COUNTED):
            self._seen.products[self._running[-1]] += macs
        return found

    def _product_macs(self, operation: Any, args: Any) -> int:
        if operation in _FACTORS:
            one, other = (args[i] for i in _FACTORS[operation])
            is_of_weight = _place(one) in self._held or _place(other) in self._held
            return 0 if is_of_weight else int(one.numel()) * int(other.shape[-1])
        if operation is not None and operation.__name__.startswith(_ATTENTION) and len(args) >= 3:
            query, key, value = args[:3]
            if all(isinstance(each, Tensor) and each.dim() == 4 for each in (query, key, value)):
                return int(query.shape[:-1].numel()) * int(key.shape[-2]) * int(query.shape[-1] + value.shape[-1])
        return 0

    def only_normalised(self, returned: Any) -> set[nn.Module]:
        """Return the layers whose outputs, all of them, went into batch normalisation and nowhere else."""
        elsewhere = self._used_elsewhere | {id(each) for each in tree_leaves(returned)}
        spoiled = {made[0] for key, made in self._made.items() if key in elsewhere or key not in self._normalised}
        return {made[0] for made in self._made.values()} - spoiled


def _place(value: Any) -> int:
    """Return where the memory begins that a tensor is in, the same for all its views; 0 for what has none."""
    if not isinstance(value, Tensor) or is_lazy(value) or value.layout != torch.strided:
        return 0
    try:
        return value.untyped_storage().data_ptr() or -1
    except (RuntimeError, NotImplementedError):  # kinds of tensor that hold others, or nothing
        return 0


def _version(output: Any) -> int:
    """Return how often a tensor was changed in place; inference tensors do not say."""
    return output._version if isinstance(output, Tensor) and not output.is_inference() else 0


def _see_layer(seen: Trace, layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
    axes = len(getattr(layer, "kernel_size", ()))
    inputs = next(iter((*args, *kwargs.values()))) if axes else output
    seen.has_unbatched |= axes > 0 and inputs.dim() == axes + 1
    batch = output.shape[: output.dim() - axes - 1].numel()
    before, behind = (tuple(each.shape[each.dim() - axes :]) for each in (inputs, output))
    # A transposed weight is applied at every input.
    seen.outputs[layer] += batch * math.prod(before if getattr(layer, "transposed", False) else behind)
    seen.maps[layer][before, behind] += batch


def _see_sequences(seen: Trace, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """See where the batch is, which may not be the first axis; the layers of an opened module are seen themselves."""
    inputs = args[0] if args else kwargs.get("query", kwargs.get("input"))
    seen.has_unbatched |= isinstance(inputs, Tensor) and inputs.dim() == 2
    if isinstance(inputs, Tensor) and inputs.dim() == 3 and not module.batch_first:
        seen.samples = inputs.shape[1]


def _see_attention(seen: Trace, attention: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    assert isinstance(attention, nn.MultiheadAttention)
    _see_sequences(seen, attention, args, kwargs, output)
    query, key, value = (args[i] if i < len(args) else kwargs[name] for i, name in enumerate(("query", "key", "value")))
    width, samples = attention.embed_dim, 1 if query.dim() == 2 else query.shape[0 if attention.batch_first else 1]
    seen.other_macs[attention] += sum(each.numel() * width for each in (query, key, value))  # positions · in · out
    # What PyTorch does inside in one piece: scores and their sum over the values, for all heads together.
    keys = key.numel() // key.shape[-1] // samples + (attention.bias_k is not None) + attention.add_zero_attn
    seen.products[attention] += query.numel() // width * keys * 2 * width
    # out_proj is never called as a module: its weight is used at the query's positions.
    seen.outputs[attention.out_proj] += query.numel() // width


def _see_recurrent(seen: Trace, recurrent: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    _see_sequences(seen, recurrent, args, kwargs, output)
    inputs = args[0] if args else kwargs["input"]
    data = inputs.data if isinstance(inputs, nn.utils.rnn.PackedSequence) else inputs
    weights = sum(p.numel() for name, p in recurrent.named_parameters(recurse=False) if name.startswith("weight"))
    seen.other_macs[recurrent] += weights * data.shape[:-1].numel()


_SEEING: dict[Any, Callable[..., None]] = {
    Opened: _see_sequences,
    (*CONVOLUTIONS, nn.Linear): _see_layer,
    nn.MultiheadAttention: _see_attention,
    nn.RNNBase: _see_recurrent,
}


def shape_of(layer: Layer) -> LayerShape:
    """Return the layer without its values."""
    stages, transposed = layer.chain.stages, layer.chain.transposed
    return LayerShape(name=layer.name, form=layer.form, shape=layer.shape, stages=stages, transposed=transposed)


def layer_costs(layers: Sequence[Layer], seen: Trace) -> tuple[LayerCost, ...]:
    """Return the cost of every decomposed layer; its MACs are 0 where the pass did not reach it."""
    costs = []
    for layer in layers:
        chain = layer.chain
        each = per_rank([s * p for s, p in zip(chain.sizes, seen.positions(layer, chain), strict=True)])
        macs = tuple(map(seen.per_sample, each)) if isinstance(each, tuple) else seen.per_sample(each)
        dense_macs = seen.per_sample(chain.dense_size * sum(seen.outputs[m] for m in layer.modules))
        costs.append(LayerCost.of(shape_of(layer), dense_macs=dense_macs, macs_per_rank=macs))
    return tuple(costs)


def other_macs(layers: Sequence[Layer], seen: Trace) -> int:
    """Return the MACs of everything that is not decomposed, the products of activations among it."""
    decomposed = {module for layer in layers for module in layer.modules}
    left = sum(macs for module, macs in macs_left_alone(seen).items() if module not in decomposed)
    return seen.per_sample(left + seen.products.total())


def macs_left_alone(seen: Trace) -> Counter[nn.Module]:
    """Return by module the MACs of its own weights as they are, for the whole batch."""
    macs = seen.other_macs.copy()
    for module, positions in seen.outputs.items():
        with evaluating(module):  # one that is computed may change by being asked for, in training
            assert isinstance(module.weight, Tensor)
            macs[module] += module.weight.numel() * positions
    return macs


def not_counted(model: nn.Module, seen: Trace) -> dict[str, str]:
    """Return modules that hold parameters of their own which no formula here counts, with their type."""
    counted = {*seen.outputs, *seen.other_macs}
    return {
        plain_name(name): type(module).__name__
        for name, module in model.named_modules()
        if module not in counted
        and not isinstance(module, _WITHOUT_COST)
        and any(p is not None for p in module._parameters.values())
    }
