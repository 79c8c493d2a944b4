"""The layers of the low-rank network that a joint step trains beside the full one, and their layout in memory.

On a CPU thin convolutions are faster with channels last. That is a layout and changes no result, but a model may call
`.view` on a feature map, which only works in the layout that it expects. Whether a model takes channels last is found
out once, in the first call of the network's own `forward` that comes by a convolution:

    forward with channels last ─┬─ runs ─────▶ taken, from now on
                                └─ raises ───▶ the same call in the usual layout ─┬─ runs ─────▶ not taken, from now on
                                                                                  └─ raises ───▶ the model's own error

The closure of the step sees nothing of that: what it does itself, with outputs or with parts of the network, it does in
the usual layout, and what it raises is never caught.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from decomposable.core.layers import ChainLayers, Layer, laid_out
from decomposable.core.standin import factored_weight, product
from decomposable.core.tree import remembered
from decomposable_edge.sizing.cost import chain_is_faster


class LowRankLayer(nn.Module):
    """A layer of the low-rank network: its chain, or a dense W̃ where that is faster; or the layer, uncut."""

    def __init__(
        self, layer: Layer, layers: ChainLayers, weights: tuple[Tensor, ...] | None, layout: ChannelsLastProbe
    ) -> None:
        super().__init__()
        self._parameters["weight"] = layer.parameter  # by the name that the model knows it
        self.name, self.bias = layer.name, layers.module.bias
        self.training = layers.module.training
        self.layers, self.weights, self.layout = layers, weights, layout
        self.memory_format = layout.memory_format
        self.has_run = False

    @property
    def weight(self) -> Tensor:
        """Return W̃ for a model that takes it from the layer: computed when it is used, with gradients to W."""
        self.has_run = True
        module = self.layers.module
        if self.weights is None:
            return module.weight
        return factored_weight(self.weights, module.weight.shape, swapped=self.layers.chain.transposed)

    def __getattr__(self, name: str) -> Any:
        """Return the layer's own sizes and options: a model may ask for `in_features` or `stride`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "layers" not in self.__dict__:
                raise
            return getattr(self.layers.module, name)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Return W̃ applied to the input; a transposed convolution may be told the size of its output."""
        self.has_run = True
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint repeats, in the layout of its first pass
            self.memory_format = self.layout.memory_format
        module, chain, weights = self.layers.module, self.layers.chain, self.weights
        given = (input,) if output_size is None else (input, output_size)
        if weights is not None and self._is_faster_as_chain([len(each) for each in weights[:-1]], input):
            made = self.layers.build(*(laid_out(weight, self.memory_format) for weight in chain.held(weights)))
            return made.forward(*given)  # hooks: this layer has them
        whole = module.weight if weights is None else product(weights, swapped=chain.transposed)
        whole = laid_out(whole, self.memory_format)
        if isinstance(module, nn.Linear):
            return nn.functional.linear(input, whole, module.bias)
        applied: Tensor = self.layers.dense(whole).forward(*given)
        return applied

    def _is_faster_as_chain(self, ranks: Sequence[int], input: Tensor) -> bool:
        """Apply the rule of `cost.chain_is_faster` to this layer and input."""
        module, chain = self.layers.module, self.layers.chain
        axes = len(chain.shape) - 2
        kept = input.dim() - 1 - axes  # axes of the input that are no channels, nor the kernel's
        extents = input.shape[kept + 1 :] if axes else ()
        strides = () if isinstance(module, nn.Linear) else module.stride
        pairs = list(zip(extents, strides, strict=True))
        outputs = [size * step if chain.transposed else math.ceil(size / step) for size, step in pairs]
        maps = chain.positions(extents, outputs)
        return chain_is_faster(chain, ranks, inputs=math.prod(extents), maps=maps, samples=input.shape[:kept].numel())


_REFUSALS = (RuntimeError, ValueError, AssertionError)  # torch's own words, and those of a model that checks


class ChannelsLastProbe:
    """The layout of the low-rank layers: channels last while their network's own forward runs, if it takes that."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        on_cpu = layers[0].weight.device.type == "cpu"
        is_open = on_cpu and any(len(layer.shape) == 4 for layer in layers)
        self._is_taken: bool | None = None if is_open else False  # None: not known yet
        self._is_running = False
        self.memory_format = torch.contiguous_format

    @contextmanager
    def used_by(self, network: nn.Module) -> Iterator[None]:
        """Run calls of the network's forward inside in the faster layout.

        Afterwards the network has its own forward again: it would refer to itself, and be freed late.
        """
        if self._is_taken is False:
            yield
            return
        forward, patched = network.forward, network.__dict__.get("forward")

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(network, partial(forward, *args, **kwargs))

        network.__dict__["forward"] = run
        try:
            yield
        finally:
            del network.__dict__["forward"]
            if patched is not None:
                network.__dict__["forward"] = patched

    def _run(self, network: nn.Module, forward: Callable[[], Any]) -> Any:
        if self._is_running or self._is_taken is False:  # a call inside another belongs to that
            return forward()
        self._is_running = True
        try:
            return self._with_channels_last(forward) if self._is_taken else self._run_first(network, forward)
        finally:
            self._is_running = False

    def _run_first(self, network: nn.Module, forward: Callable[[], Any]) -> Any:
        """Try channels last, with random numbers and buffers as before where the model does not take them."""
        restore = remembered(network)
        try:
            output = self._with_channels_last(forward)
            layers = (module for module in network.modules() if isinstance(module, LowRankLayer))
            if not any(x.memory_format == torch.channels_last and len(x.layers.chain.shape) == 4 for x in layers):
                return output  # no feature map has been in that layout: it stays open
            _try_backward(network, output)
        except _REFUSALS as error:
            # torch raises the death of a worker process wherever the program happens to be, and only once.
            if "DataLoader worker" in str(error):
                raise
        else:
            self._is_taken = True
            return output
        restore()
        output = forward()  # what is wrong for another reason is wrong here, too
        self._is_taken = False
        return output

    def _with_channels_last(self, forward: Callable[[], Any]) -> Any:
        """Return outputs in the layout that the closure expects, which may call `.view`."""
        self.memory_format = torch.channels_last
        try:
            output = forward()
        finally:
            self.memory_format = torch.contiguous_format
        return tree_map_only(Tensor, lambda t: t.contiguous() if t.layout == torch.strided else t, output)


def _try_backward(network: nn.Module, output: Any) -> None:
    """Lead a gradient back, in the layout of the features: code of the model's own may refuse it there.

    Not where hooks would see it, which may count what they see. It goes to the first parameter, which is behind all the
    others in most models, and to the vectors: all gradients at once would be the most memory that a step ever takes.
    """
    outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    trainable = [p for p in network.parameters() if p.requires_grad]
    parameters = [p for i, p in enumerate(trainable) if i == 0 or p.dim() < 2]
    has_hooks = any(module._backward_hooks or module._backward_pre_hooks for module in network.modules())
    if outputs and parameters and not has_hooks:
        with torch.autocast("cpu", enabled=False):
            gradients = [torch.ones_like(t) for t in outputs]
            torch.autograd.grad(outputs, parameters, gradients, retain_graph=True, allow_unused=True)
