"""One plain loop for every method: watched, stopped and resumed without a trace.

Whatever a step depends on is either in the checkpoint (weights, optimiser, the method's own state, the global
generators) or follows from the settings and the step's number (the batch, its augmentation, the learning rate). A run
that is killed anywhere therefore ends, once resumed, with the very bits of one that was not.

Several processes (`distributed.py`) have the same steps: each has its part of every batch, the mean of their gradients
is the gradient, and the first of them writes. What they draw for themselves, such as dropout, is in the checkpoint.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from decomposable.core.processes import ALONE, Processes
from decomposable.data.base import Batch, TrainBatches
from decomposable.elastic.options import cosine
from decomposable.elastic.options import rate_factor as rate_factor_of
from decomposable.progress import Progress, Report, as_duration, quiet
from decomposable.recipes.settings import Settings
from decomposable.training.checkpoint import Checkpoints, Position, position_in, restore_
from decomposable.training.devices import bits_depend_on, random_state
from decomposable.training.distributed import average_gradients_, mean_values
from decomposable.training.divergence import Loss, WatchedLoss, check_finite, check_weights, naming_step
from decomposable.training.methods.base import Averaging, Paced, Steady, Step
from decomposable.training.metrics import MetricsLog
from decomposable_edge.interrupts import Interrupted

Say = Callable[[str], None]  # told a line that stays
STEPS_PER_LINE = 50  # how often a step gets a line of its own in the metrics


@dataclass(frozen=True, kw_only=True)
class Watchers:
    """Whom the loop tells what: a line that is written over, a line that stays, and the metrics."""

    log: MetricsLog
    progress: Report = quiet
    say: Say = quiet


def train(
    model: nn.Module,
    batches: TrainBatches,
    method: Step,
    settings: Settings,
    *,
    loss: Loss,
    evaluate: Callable[[nn.Module], float],
    checkpoints: Checkpoints,
    saved: Mapping[str, Any] | None,
    watchers: Watchers,
    stop: threading.Event,
    identity: Mapping[str, Any],
    peak_learning_rate: float,
    commit: str | None = None,
    processes: Processes = ALONE,
) -> Position:
    """Train in place, from the start or from the checkpoint that was `saved`, until it is done or asked to `stop`.

    `identity` goes into the checkpoints: who resumes compares it.
    """
    optimizer = optimizer_for(model, settings, peak_learning_rate)
    position = Position()
    if saved is not None:
        position = position_in(saved, checkpoints.path, batches)
        restore_(saved, checkpoints.path, model, optimizer, method, index=processes.index)
    if commit is not None and commit not in position.commits:
        position.commits.append(commit)
    device = next(model.parameters()).device

    def checkpoint() -> None:
        check_weights(model, position.step, checkpoints.path)  # the last one must be good
        told = [] if processes.is_alone else processes.gathered(json.dumps(random_state()).encode())
        others = [json.loads(one) for one in told[1:]]
        if not processes.is_first:
            return
        checkpoints.write(
            {
                **({"random_of_others": others} if others else {}),
                "run": dict(identity),
                "position": vars(position).copy(),
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "method": method.state_dict(),
                "bits_depend_on": bits_depend_on(str(device), processes.count),
            }
        )

    clock = _Clock(total=len(batches))
    for batch in batches.loader(position.step, workers=settings.workers) if position.step < len(batches) else ():
        model.train()
        steady = method.steady if isinstance(method, Steady) else 0.0
        rate = peak_learning_rate * rate_factor(settings, position.step, batches.per_epoch, steady)
        for group in optimizer.param_groups:  # a function of the step's number needs no scheduler, and no state of one
            group["lr"] = rate
        if isinstance(method, Paced):
            method.at(position.step, len(batches))
        optimizer.zero_grad()
        watched = WatchedLoss(loss, moved(batch, device, settings), settings.precision)
        with naming_step(position.step, checkpoints.path):
            values = mean_values(_backward(method, watched, model, processes), len(batch[1]), processes)
        norm = _gradient_norm(model, settings.clip_norm)
        check_finite(model, values, norm, watched, position.step, checkpoints.path)
        optimizer.step()
        position.step += 1
        position.add({**values, "gradient_norm": norm})
        position.seconds += clock.lap()
        watchers.progress(clock.line(position, batches.per_epoch, values))
        if position.step % STEPS_PER_LINE == 0:
            watchers.log.write("step", position.step, {**values, "gradient_norm": norm, "learning_rate": rate})
        if position.step % batches.per_epoch == 0:
            _end_epoch(position, batches, settings, watchers, lambda: evaluate(model))
            position.seconds += clock.lap()
        is_due, is_stopping = processes.anywhere([checkpoints.is_due and processes.is_first, stop.is_set()])
        if is_due or is_stopping:
            checkpoint()
        if is_stopping:
            raise Interrupted(
                f"stopped at step {position.step:,} of {len(batches):,}; --resume goes on from {checkpoints.path}"
            )
    checkpoint()
    model.eval()
    return position


def _backward(method: Step, watched: WatchedLoss, model: nn.Module, processes: Processes) -> dict[str, float]:
    """Add the gradient of a batch, of all processes, to every `.grad`; return what was seen on this process."""
    samples = len(watched.batch[1])
    if isinstance(method, Averaging):
        method.has_samples(samples)
        return {name: float(value) for name, value in method.backward(watched).items()}
    seen = processes.together(lambda: {name: float(value) for name, value in method.backward(watched).items()})
    average_gradients_(model, samples, processes)
    return seen


def optimizer_for(model: nn.Module, settings: Settings, rate: float) -> torch.optim.Optimizer:
    """Return the optimiser that the settings name, at the highest rate."""
    groups, momentum = parameter_groups(model, settings.weight_decay), settings.momentum
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, betas=(momentum, 0.98))
    return torch.optim.SGD(groups, lr=rate, momentum=momentum, nesterov=settings.nesterov and momentum > 0)


def _end_epoch(
    position: Position, batches: TrainBatches, settings: Settings, watchers: Watchers, evaluate: Callable[[], float]
) -> None:
    epoch = position.step // batches.per_epoch
    values: dict[str, Any] = {"epoch": epoch, **position.means()}
    if epoch % settings.evaluate_every == 0 or epoch == batches.epochs:
        watchers.progress(Progress("training", f"testing after epoch {epoch}"))
        values["accuracy"] = evaluate()
    values["seconds"] = round(position.seconds, 2)
    watchers.log.write("epoch", position.step, values)
    parts = [f"epoch {epoch:{len(str(batches.epochs))}}/{batches.epochs}"]
    for name, text in (
        ("loss", "loss"),
        ("loss_low", "low-rank loss"),
    ):  # where networks take turns, one may be missing
        if name in values:
            parts.append(f"{text} {values[name]:.4f}")
    if "accuracy" in values:
        parts.append(f"test accuracy {values['accuracy']:.2f}%")
    watchers.say("  ".join([*parts, as_duration(position.seconds)]))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for the kernels of convolutions and linear layers, none for biases and normalisation."""
    kernels: set[int] = set()
    for module in model.modules():
        if isinstance(module, _ConvNd | nn.Linear):
            kernels.add(id(module.weight))
        elif isinstance(module, nn.MultiheadAttention):  # packed linear layers
            packed = (module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            kernels.update(map(id, packed))
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if id(p) in kernels], "weight_decay": weight_decay},
        {"params": [p for p in trainable if id(p) not in kernels], "weight_decay": 0.0},
    ]


def rate_factor(settings: Settings, step: int, steps_per_epoch: int, steady: float = 0.0) -> float:
    """Return the learning rate of a step as a part of the highest one, which it is until the part `steady`.

    >>> [rate_factor(Settings(epochs=10), step, 1) for step in (0, 3, 6, 9)] == [1.0, 0.2, 0.2**2, 0.2**3]
    True
    """
    total = settings.epochs * steps_per_epoch
    falls: dict[str, Callable[[float], float]] = {
        "cosine": cosine,
        "polynomial": lambda done: max(0.0, 1 - done) ** settings.power,
        "steps": lambda _: (
            settings.decay
            ** sum(step >= round((steady + (1 - steady) * milestone) * total) for milestone in settings.milestones)
        ),
        "constant": lambda _: 1.0,
    }
    warmup = settings.warmup_epochs * steps_per_epoch
    return float(rate_factor_of(step, total, warmup=warmup, steady=steady, fall=falls[settings.schedule]))


def _gradient_norm(model: nn.Module, limit: float) -> float:
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if limit > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return float(norm)


class _Clock:
    """Seconds per step, as they were lately, and the time that is left."""

    def __init__(self, *, total: int) -> None:
        self.total = total
        self._last = time.perf_counter()
        self._lately: deque[float] = deque([self._last], maxlen=200)  # when the last steps ended

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds

    def line(self, position: Position, per_epoch: int, values: Mapping[str, float]) -> Progress:
        """Epoch, step, loss, rate and time left."""
        self._lately.append(time.perf_counter())
        per_step = (self._lately[-1] - self._lately[0]) / (len(self._lately) - 1)
        epoch, place = divmod(position.step - 1, per_epoch)
        losses = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in values.items() if "loss" in name)
        where = f"epoch {epoch + 1}/{self.total // per_epoch}, step {place + 1}/{per_epoch}"
        return Progress(
            "training",
            f"{where}, {losses}, {1 / per_step:.2f} steps/s",
            fraction=position.step / self.total,
            seconds_left=per_step * (self.total - position.step),
        )


def moved(batch: Batch, device: torch.device, settings: Settings) -> Batch:
    """Return the batch on the model's device, in the layout of the settings."""
    x, y = batch
    layout = torch.channels_last if settings.channels_last and x.dim() == 4 else torch.preserve_format
    return x.to(device, non_blocking=True, memory_format=layout), y.to(device, non_blocking=True)
