"""The layers of the low-rank network that a joint step trains beside the full one, and their layout in memory.

On a CPU thin convolutions are faster with channels last. That is a layout and changes no result, but a model may call
`.view` on a feature map, which only works in the layout that it expects. Whether a model takes channels last is found
out once, in the first call of the network's own `forward`:

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

from decomposable.core.forms import first_weight, second_weight, to_weight
from decomposable.core.layers import Layer, TwoFactors, laid_out
from decomposable.core.standin import factored_weight
from decomposable.core.tree import remembered
from decomposable.sizing.cost import two_factors_are_faster


class LowRankLayer(nn.Module):
    """A layer of the low-rank network: two factors one after the other, or a dense W̃ = P Q where that is faster."""

    def __init__(self, layer: Layer, pair: TwoFactors, factors: tuple[Tensor, Tensor] | None, layout: Layout) -> None:
        super().__init__()
        self._parameters["weight"] = layer.weight  # by the name that the model knows it
        self.name, self.bias = layer.name, pair.module.bias
        self.training = pair.module.training
        self.pair, self.factors, self.layout = pair, factors, layout
        self.memory_format = layout.memory_format
        self.has_run = False

    @property
    def weight(self) -> Tensor:
        """W̃ for a model that takes it from the layer: computed when its values are used, with gradients to W."""
        module, form = self.pair.module, self.pair.form
        self.has_run = True
        if self.factors is None:
            return module.weight
        (p_MR, q_RN), shape = self.factors, module.weight.shape
        return factored_weight(first_weight(p_MR, shape, form), second_weight(q_RN, shape, form), shape, form)

    def __getattr__(self, name: str) -> Any:
        """Sizes and options are the layer's own: a model may ask for `in_features` or `stride`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "pair" not in self.__dict__:
                raise
            return getattr(self.pair.module, name)

    def forward(self, input: Tensor) -> Tensor:
        """W̃ applied to the input."""
        self.has_run = True
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint repeats, in the layout of its first pass
            self.memory_format = self.layout.memory_format
        module, form = self.pair.module, self.pair.form
        if self.factors is None:
            return _apply(module, input, module.weight)
        p_MR, q_RN = self.factors
        if _is_faster_factored(module, form, p_MR.shape[1], input):
            return self.pair.from_factors(p_MR, q_RN, self.memory_format).forward(input)  # hooks: this layer has them
        return _apply(module, input, laid_out(to_weight(p_MR @ q_RN, module.weight.shape, form), self.memory_format))


def _apply(module: nn.Conv2d | nn.Linear, input: Tensor, weight: Tensor) -> Tensor:
    """The layer's own computation with another weight."""
    if isinstance(module, nn.Linear):
        return nn.functional.linear(input, weight, module.bias)
    return module._conv_forward(input, weight, module.bias)


def _is_faster_factored(module: nn.Conv2d | nn.Linear, form: str, rank: int, input: Tensor) -> bool:
    """The rule of `cost.two_factors_are_faster` for this layer and input."""
    if isinstance(module, nn.Linear):
        samples = input.shape[:-1].numel()
        inputs = between = outputs = 1
    else:
        height, width = input.shape[-2:]
        rows, columns = (math.ceil(size / stride) for size, stride in zip((height, width), module.stride, strict=True))
        samples, inputs, outputs = input.shape[:-3].numel(), height * width, rows * columns
        between = height * columns if form == "spatial" else outputs
    return two_factors_are_faster(
        module.weight.shape, form, rank, inputs=inputs, between=between, outputs=outputs, samples=samples
    )


class Layout:
    """The layout of the low-rank layers: channels last while their network's own forward runs, if it takes that."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        on_cpu = layers[0].weight.device.type == "cpu"
        is_open = on_cpu and any(len(layer.shape) == 4 for layer in layers)
        self._is_taken: bool | None = None if is_open else False  # None: not known yet
        self._is_running = False
        self.memory_format = torch.contiguous_format

    @contextmanager
    def used_by(self, network: nn.Module) -> Iterator[None]:
        """Inside, calls of the network's forward run in the faster layout.

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
            _try_backward(network, output)
        except Exception as error:  # a layout is refused in many words
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
        self.memory_format = torch.channels_last
        try:
            output = forward()
        finally:
            self.memory_format = torch.contiguous_format
        return tree_map_only(Tensor, _in_usual_layout, output)


def _in_usual_layout(output: Tensor) -> Tensor:
    """As the closure expects it, which may call `.view`; what has less than three axes is no map of features."""
    return output.contiguous() if output.dim() > 2 and output.layout == torch.strided else output


def _try_backward(network: nn.Module, output: Any) -> None:
    """Lead a gradient back through what has run: its layout is that of the features, and code of the model's own may
    refuse it there. Not where hooks would see it, which may count what they see.

    It goes to the first parameter, which is behind all the others in most models, and to the vectors: all gradients at
    once, while nothing that was kept for them may be freed, would be the most memory that a step ever takes.
    """
    outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    trainable = [p for p in network.parameters() if p.requires_grad]
    parameters = [p for i, p in enumerate(trainable) if i == 0 or p.dim() < 2]
    has_hooks = any(module._backward_hooks or module._backward_pre_hooks for module in network.modules())
    if outputs and parameters and not has_hooks:
        with torch.autocast("cpu", enabled=False):
            gradients = [torch.ones_like(t) for t in outputs]
            torch.autograd.grad(outputs, parameters, gradients, retain_graph=True, allow_unused=True)
