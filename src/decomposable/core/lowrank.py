"""A layer of the low-rank network that a joint step trains beside the full one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.forms import first_weight, second_weight, to_weight
from decomposable.core.layers import Layer, TwoFactors, laid_out
from decomposable.core.layout import Layout
from decomposable.core.standin import factored_weight
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
