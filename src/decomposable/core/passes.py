"""One pass of a joint step: how a network is run on a batch, its loss, and the mean over all processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decomposable.core.gradients import Gradient
from decomposable.core.processes import Averaging, Processes
from decomposable_edge.checks import is_integer, is_number
from decomposable_edge.errors import InvalidArgumentError

Closure = Callable[[nn.Module], Tensor]
Scaler = torch.amp.GradScaler


class LossSpec(NamedTuple):
    """Say how a network is run, the loss of what comes out, and how much that counts."""

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
        is_alone: bool,
    ) -> LossSpec:
        """Check what was given to `backward`; with several processes, one of them may have no samples."""
        if samples is not None and (not is_integer(samples) or samples < (1 if is_alone else 0)):
            allowed = "an int of at least 1, or with several processes 0 where there is none"
            raise InvalidArgumentError.about("samples", samples, allowed)
        samples = 1 if is_alone else samples  # of one, it does not matter how many
        if not is_number(weight) or not 0 < weight < math.inf:
            raise InvalidArgumentError.about("weight", weight, "a number above 0, such as 1/len(batches)")
        if closure is not None and forward is None and loss is None:
            return cls(closure, lambda loss: loss, "closure", weight, samples)
        if closure is None and forward is not None and loss is not None:
            return cls(forward, loss, "loss", weight, samples)
        raise InvalidArgumentError("backward: allowed: a closure, or both forward= and loss=")

    def run_counted(self, network: nn.Module) -> tuple[Any, int]:
        """Return what comes out, and of how many samples by the length of the network's input; 1 where it has none."""
        if self.samples is not None:
            return self.run(network), self.samples
        counts: list[int] = []

        def note(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 0)
            counts.extend(len(first) for first in [next(tensors, None)] if first is not None)

        hook = network.register_forward_pre_hook(note, with_kwargs=True)
        try:
            outputs = self.run(network)
        finally:
            hook.remove()
        return outputs, sum(counts) if counts else 1

    def scale(self, scaler: Scaler | None, loss: Tensor) -> Tensor | float:
        """Return what the loss is multiplied by before its gradient is taken; the running norms are without it."""
        if scaler is None:
            return self.weight
        return scaler.scale(torch.ones((), device=loss.device)) * self.weight


class Local(NamedTuple):
    """Hold what a network gave here: its loss and its gradient."""

    loss: Tensor
    gradient: Gradient
    samples: int  # that the loss is the mean of

    @classmethod
    def nothing(cls, trainable: Sequence[nn.Parameter]) -> Local:
        """Return the result of a pass without samples."""
        return cls(torch.zeros((), device=trainable[0].device), dict.fromkeys(trainable), 0)


class Pass(NamedTuple):
    """Hold the same over all processes."""

    loss: Tensor
    averaging: Averaging

    @property
    def gradient(self) -> Gradient:
        """Wait for what is still on its way."""
        return self.averaging.wait()


def averaged(run: Callable[[], Local], trainable: Sequence[nn.Parameter], processes: Processes) -> Pass:
    """Return the mean Σ_p n_p ∇_p / Σ_p n_p, and that of the losses. What fails on one process fails on all."""
    if processes.is_alone:
        found = run()
        return Pass(found.loss, processes.mean(found.gradient, 1.0, ()))

    def local() -> tuple[Local, list[float]]:
        found = run()
        if any(value is not None and value.layout is not torch.strided for value in found.gradient.values()):
            raise InvalidArgumentError(
                "model: a gradient is sparse; allowed with several processes: dense ones (sparse=False of an embedding)"
            )
        used = [found.gradient[p] is not None for p in trainable]
        return found, [found.samples, found.samples * float(found.loss) if found.samples else 0.0, *used]

    found, (total, loss, *used) = processes.summed(local, 2 + len(trainable))
    if total == 0:
        raise InvalidArgumentError.about("samples", 0, "at least one sample on some process")
    averaging = processes.mean(found.gradient, found.samples / total, [count > 0 for count in used])
    return Pass(torch.full_like(found.loss, loss / total), averaging)
