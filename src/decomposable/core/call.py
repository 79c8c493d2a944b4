"""What a joint step is told of a batch: how a network is run on it, its loss, and how much that counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decomposable.core.passes import counting_samples
from decomposable_edge.checks import is_integer, is_number
from decomposable_edge.errors import InvalidArgumentError

Closure = Callable[[nn.Module], Tensor]
Scaler = torch.amp.GradScaler


class LossSpec(NamedTuple):
    """How a network is run, the loss of what comes out, and how much that counts."""

    run: Callable[[nn.Module], Any]
    loss: Callable[[Any], Tensor]
    name: str  # of the argument that gives the loss
    weight: float
    samples: int | None  # that it is the mean of, where that was said

    @classmethod
    def of(
        cls,
        closure: Closure | None,
        forward: Callable[[nn.Module], Any] | None,
        loss: Callable[[Any], Tensor] | None,
        *,
        weight: float,
        samples: int | None,
        distill: float,
        is_alone: bool,
    ) -> LossSpec:
        """What was given to `backward`, checked; with several processes, one of them may have no samples."""
        if samples is not None and (not is_integer(samples) or samples < (1 if is_alone else 0)):
            raise InvalidArgumentError(
                f"samples={samples!r}; allowed: an int of at least 1, or with several processes 0 where there is none"
            )
        samples = 1 if is_alone else samples  # of one, it does not matter how many
        if not is_number(weight) or not 0 < weight < math.inf:
            raise InvalidArgumentError(f"weight={weight!r}; allowed: a number above 0, such as 1/len(batches)")
        if closure is not None and forward is None and loss is None:
            if distill:
                raise InvalidArgumentError(
                    f"backward: distill={distill:g} needs the outputs, which a closure does not show; allowed: "
                    "backward(forward=lambda net: net(x), loss=lambda out: ...)"
                )
            return cls(closure, lambda loss: loss, "closure", weight, samples)
        if closure is None and forward is not None and loss is not None:
            return cls(forward, loss, "loss", weight, samples)
        raise InvalidArgumentError("backward: allowed: a closure, or both forward= and loss=")

    def run_counted(self, network: nn.Module) -> tuple[Any, int]:
        """What comes out, and of how many samples, as far as the network's input tells; 1 where it does not."""
        if self.samples is not None:
            return self.run(network), self.samples
        counts: list[int] = []
        with counting_samples(network, counts):
            outputs = self.run(network)
        return outputs, sum(counts) if counts else 1

    def scale(self, scaler: Scaler | None, loss: Tensor) -> Tensor | float:
        """By what the loss is multiplied before its gradient is taken; the running norms are without it."""
        if scaler is None:
            return self.weight
        return scaler.scale(torch.ones((), device=loss.device)) * self.weight
