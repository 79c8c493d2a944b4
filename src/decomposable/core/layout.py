"""In which memory layout the low-rank network of a joint step computes.

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from decomposable.core.layers import Layer
from decomposable.core.tree import remembered


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
