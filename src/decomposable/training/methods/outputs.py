"""What a network says, beside its loss: for methods in which one network learns from another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from decomposable.training.methods.base import Closure
from decomposable_edge.errors import InvalidArgumentError


def loss_and_outputs(closure: Closure, network: nn.Module, method: str, otherwise: str = "") -> tuple[Tensor, Tensor]:
    """Return the loss of a network and the outputs that it belongs to, in float32 or better.

    A message says what the method allows, and what else would do `otherwise`.
    """
    calls: list[Any] = []
    with network.register_forward_hook(lambda module, args, output: calls.append(output)):
        loss = closure(network)
    if len(calls) != 1:
        raise InvalidArgumentError(
            f"loss: it calls the network {len(calls)} times; allowed with method={method}: once, by net(x)"
        )
    outputs = calls[0]
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or not outputs.is_floating_point():
        came = f"outputs of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise InvalidArgumentError(
            f"model: it gives {came}; allowed with method={method}: (samples, classes), to be distilled"
            f"{otherwise and f', {otherwise}'}"
        )
    return loss, outputs.to(torch.promote_types(outputs.dtype, torch.float32))
