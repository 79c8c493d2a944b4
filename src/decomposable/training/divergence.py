"""When a loss is no longer a number: stop before the weights are spoilt, and say where it began."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.data.base import Batch
from decomposable_edge.errors import DecomposableError, NonFiniteError

Loss = Callable[[nn.Module, Batch], Tensor]


class DivergedError(DecomposableError):
    """A loss or gradient is NaN or infinite: at which `step`, and the last good `checkpoint`, if there is one."""

    step: int | None = None
    checkpoint: Path | None = None

    @classmethod
    def at(cls, step: int, came: str, checkpoint: Path) -> DivergedError:
        """Return the error of a step, counted from 1."""
        error = cls(f"step {step:,}: {came}; {_way_out(checkpoint)}")
        error.step, error.came, error.checkpoint = step, came, checkpoint if checkpoint.exists() else None
        return error


class WatchedLoss:
    """The loss of one batch as a closure that remembers the networks it was called with, to ask them afterwards."""

    def __init__(self, loss: Loss, batch: Batch, precision: str) -> None:
        self.loss, self.batch, self.precision = loss, batch, precision
        self.networks: list[nn.Module] = []

    def __call__(self, network: nn.Module) -> Tensor:
        """Return the loss of a network, and remember the network."""
        self.networks.append(network)
        return self.on(network)

    def on(self, network: nn.Module) -> Tensor:
        """Return the loss of a network."""
        kind, is_low = self.batch[0].device.type, self.precision == "bfloat16"
        with torch.autocast(kind, dtype=torch.bfloat16) if is_low else nullcontext():
            return self.loss(network, self.batch)


def check_finite(
    model: nn.Module, values: Mapping[str, float], norm: float, watched: WatchedLoss, step: int, checkpoint: Path
) -> None:
    """Stop before the weights are spoilt, and say where it began."""
    losses = [(name, value) for name, value in values.items() if name.startswith("loss")]
    bad = next(((i, name, value) for i, (name, value) in enumerate(losses) if not math.isfinite(value)), None)
    if bad is None and math.isfinite(norm):
        return
    if bad is not None:
        index, name, value = bad
        # The last call has the last loss; a teacher's call before them may have none.
        network = watched.networks[max(index - len(losses), -len(watched.networks))]
        what = f"{'the low-rank loss' if name == 'loss_low' else 'the loss'} is {value}"
        where = _first_non_finite_layer(network, watched)
    else:
        what = f"the gradient's norm is {norm}"
        names = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        where = f"first in the gradient of '{names[0]}'" if names else "every entry is finite, their squares are not"
    raise DivergedError.at(step + 1, f"{what}, {where}", checkpoint)


def check_weights(model: nn.Module, step: int, checkpoint: Path) -> None:
    """Refuse to go on from weights that an update has spoilt, though its gradient was finite."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise DivergedError.at(step, f"it made the weight '{name}' NaN or infinite", checkpoint)


@contextmanager
def naming_step(step: int, checkpoint: Path) -> Iterator[None]:
    """Add the step and the checkpoint to what an SVD says of weights that are not finite."""
    try:
        yield
    except NonFiniteError as error:
        raise DivergedError.at(step + 1, str(error), checkpoint) from error


def _way_out(checkpoint: Path) -> str:
    kept = f"the last good checkpoint is {checkpoint}" if checkpoint.exists() else "there is no checkpoint yet"
    advice = "a new run with --init of that checkpoint, --set fine_tune_learning_rate=…"
    return f"{kept}; a smaller learning rate may help: {advice}"


@torch.no_grad()
def _first_non_finite_layer(network: nn.Module, watched: WatchedLoss) -> str:
    """Run the batch through the network once more and name the first layer with NaN or infinity in its output."""
    if not watched.batch[0].isfinite().all():
        return "already in the batch"
    for name, tensor in network.named_parameters():
        if not tensor.isfinite().all():
            return f"the weight '{name}' is not finite"
    found: list[str] = []

    def look(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not found and isinstance(output, Tensor) and not output.isfinite().all():
            found.append(name)

    with ExitStack() as hooks:
        for name, module in network.named_modules():
            if not any(module.children()):
                hooks.enter_context(module.register_forward_hook(partial(look, name)))
        watched.on(network)
    return f"first in the output of layer '{found[0]}'" if found else "in the loss itself, no layer's output is"
