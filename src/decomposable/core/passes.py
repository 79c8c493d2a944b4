"""One pass of a network over the batches of all processes: its loss and gradient, averaged by their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decomposable.core.gradients import Gradient
from decomposable.core.processes import Averaging, Processes
from decomposable_edge.errors import InvalidArgumentError


class Local(NamedTuple):
    """What a network gave here: its loss, its gradient, and its outputs where another one learns from them."""

    loss: Tensor
    gradient: Gradient
    outputs: Any
    samples: int  # that the loss is the mean of

    @classmethod
    def nothing(cls, trainable: Sequence[nn.Parameter]) -> Local:
        """Of no samples."""
        return cls(torch.zeros((), device=trainable[0].device), dict.fromkeys(trainable), None, 0)


class Pass(NamedTuple):
    """The same over all processes; the outputs are those of here."""

    loss: Tensor
    outputs: Any
    averaging: Averaging

    @property
    def gradient(self) -> Gradient:
        """Waits for what is still on its way."""
        return self.averaging.wait()


def averaged(run: Callable[[], Local], trainable: Sequence[nn.Parameter], processes: Processes) -> Pass:
    """The mean Σ_p n_p ∇_p / Σ_p n_p, and that of the losses. What fails on one process fails on all."""
    if processes.is_alone:
        found = run()
        return Pass(found.loss, found.outputs, processes.mean(found.gradient, 1.0, ()))

    def local() -> tuple[Local, list[float]]:
        found = run()
        _refuse_sparse(found.gradient)
        used = [found.gradient[p] is not None for p in trainable]
        return found, [found.samples, found.samples * float(found.loss) if found.samples else 0.0, *used]

    found, (total, loss, *used) = processes.summed(local, 2 + len(trainable))
    if total == 0:
        raise InvalidArgumentError("samples: 0 on every process; allowed: at least one on some")
    averaging = processes.mean(found.gradient, found.samples / total, [count > 0 for count in used])
    return Pass(torch.full_like(found.loss, loss / total), found.outputs, averaging)


def _refuse_sparse(gradient: Gradient) -> None:
    if any(value is not None and value.layout is not torch.strided for value in gradient.values()):
        raise InvalidArgumentError(
            "model: a gradient is sparse; allowed with several processes: dense ones (sparse=False of an embedding)"
        )


@contextmanager
def counting_samples(network: nn.Module, counts: list[int]) -> Iterator[None]:
    """Inside, the length of the first tensor of every call of the network is noted."""

    def note(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.dim() > 0:
                counts.append(len(value))
                return

    hook = network.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
