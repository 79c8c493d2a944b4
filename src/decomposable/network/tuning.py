"""Train scales, shifts and biases of their own for some sizes, taught by the full network: what `tune_` does.

    batch ─┬─ full network, as it is used ────────── outputs ─┐
           └─ a size, its batches' own statistics ── outputs ─┴─ distance ──▶ gradient of the size's vectors alone

The largest size goes first, and each one starts from the result of the one before. So neighbours are alike, and what
lies between them can be interpolated (`parts.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.distillation import Distance, detached, kl_divergence, logits_of
from decomposable.core.tracing import Forward, on_device_of
from decomposable.core.tree import put_parameters_
from decomposable.network.calibration.batches import endless, seen_by
from decomposable.network.calibration.statistics import Build, CalibrationReport, run_normalising
from decomposable.network.parts import Tuned
from decomposable.progress import Report, Tracker
from decomposable_edge.checks import check_count, is_number
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.interpolation import position
from decomposable_edge.sizing.plans import RankPlan
from decomposable_edge.sizing.ranks import RankSelector

SIZES = (0.75, 0.5, 0.35, 0.25, 0.2, 0.15, 0.1, 0.07)
"""The sizes that are tuned by default, if the network can be so small."""

# Of 0.002, 0.005 and 0.015, tried once each with 30 steps on a plain ResNet-20 at 0.35x and 0.2x, the two larger ones
# gained most; 0.01 lies between them. With 100 steps, or other networks, none was compared.
STEPS, LEARNING_RATE = 100, 0.01

SHARES = (0.0, 0.25, 0.5, 1.0)
"""How far to go from the original's vectors to the learnt ones. A batch that was not learnt from decides: a training
with few images soon learns them by heart."""


@dataclass(frozen=True, kw_only=True)
class TuningReport:
    """What a tuning did and what it costs.

    Attributes:
        sizes: that were tuned, as parts of the original, the largest first.
        steps: of training for each of them.
        seconds: it took, with calibration.
        bytes: that the vectors of all sizes take in memory.
        before: for each size, how far its outputs on one batch are from the full network's with the original's vectors.
        after: the same with its own vectors. A size that training did not improve keeps the original's. The batch is
            the loader's first one. It is not learnt from if the loader has a fixed order and more batches.
        calibration: what was calibrated afterwards; None for a network without batch normalisation.
    """

    sizes: tuple[float, ...]
    steps: int
    seconds: float
    bytes: int
    before: tuple[float, ...]
    after: tuple[float, ...]
    calibration: CalibrationReport | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What is tuned, and how: `build` makes the network of a size, `vectors` are the original's that it shares."""

    build: Build
    teacher: nn.Module
    vectors: Mapping[str, nn.Parameter]
    layer_before_norm: Mapping[str, str | None]
    full_plan: RankPlan
    forward: Forward
    distance: Distance
    steps: int
    learning_rate: float


def checked_sizes(selector: RankSelector, sizes: Sequence[float] | None) -> list[RankPlan]:
    """Return the plans of the sizes that were asked for, or of the usual ones, each once, the largest first."""
    if sizes is None:
        usual = [selector.of_size(size) for size in SIZES if size >= selector.smallest_size]
        plans = [plan for plan in usual if not plan.is_full] or [selector.smallest_plan()]
    elif isinstance(sizes, Iterable):
        plans = [selector.of_size(size) for size in sizes]
    else:
        raise InvalidArgumentError.about("sizes", sizes, "a list of sizes, such as [0.25, 0.5]")
    if not plans:
        raise InvalidArgumentError.about("sizes", [], "at least one size")
    if any(plan.ranks == selector.full_plan().ranks for plan in plans):
        why = "the full size is among them, which never changes"
        raise InvalidArgumentError.about("sizes", 1.0, "smaller ones", why=why)
    return sorted({plan.ranks: plan for plan in plans}.values(), key=position, reverse=True)


def check_training(steps: object, learning_rate: object, distance: object) -> None:
    """Refuse settings that no training can have."""
    check_count("steps", steps)
    if not (is_number(learning_rate) and 0 < learning_rate < math.inf):
        raise InvalidArgumentError.about("learning_rate", learning_rate, "a number above 0")
    if distance is not None and not callable(distance):
        raise InvalidArgumentError.about("distance", distance, "a function of (low, full), or None")


@torch.inference_mode(False)
@torch.enable_grad()
def tuned(task: Task, plans: Sequence[RankPlan], loader: Iterable[Any], report: Report) -> tuple[Tuned, TuningReport]:
    """Train the vectors of these sizes, the largest first, and return them with a report."""
    start = time.perf_counter()
    batches = endless(loader, seen_by(task.forward), "loader")
    compared = next(batches)
    tracker = Tracker(report, "tuning", total=len(plans) * task.steps, unit="steps")
    own = list(task.vectors.values())
    kind = reduce(torch.promote_types, [vector.dtype for vector in own])
    exact = torch.promote_types(kind, torch.float32)  # half precision is too coarse for the small steps
    original_T = torch.cat([vector.detach().flatten().to(exact) for vector in own])
    values_T, rows, before, after = original_T, [], [], []
    for number, plan in enumerate(plans):
        size, done = position(plan), number * task.steps
        lesson = _Lesson(task, plan)
        before.append(lesson.distance(original_T, compared))
        learned_T = lesson.learned(values_T, batches, lambda step: tracker.update(done + step, f"{size:.3f}x"))  # noqa: B023
        ways = {share: torch.lerp(original_T, learned_T, share) for share in SHARES}
        found = {share: before[-1] if share == 0 else lesson.distance(way_T, compared) for share, way_T in ways.items()}
        best = min(found, key=lambda share: found[share])  # the first of equals: the original's
        values_T = ways[best]
        after.append(found[best])
        rows.append(values_T.to(kind))
    vectors = Tuned(
        names=tuple(task.vectors),
        channels=tuple(vector.numel() for vector in own),
        layer_before_norm=tuple(task.layer_before_norm[name] for name in task.vectors),
        positions=tuple(map(position, reversed(plans))),
        plans=tuple(reversed(plans)),
        full_plan=task.full_plan,
        values_ST=torch.stack(rows[::-1]),
        original=(original_T.to(kind),),
    )
    return vectors, TuningReport(
        sizes=tuple(map(position, plans)),
        steps=task.steps,
        seconds=time.perf_counter() - start,
        bytes=vectors.bytes,
        before=tuple(before),
        after=tuple(after),
    )


class _Lesson:
    """The network of one size, of which only the vectors are trained, and its teacher."""

    def __init__(self, task: Task, plan: RankPlan) -> None:
        self.task, self.size = task, position(plan)
        own = task.vectors.values()
        self._vectors = [nn.Parameter(vector.detach().clone()) for vector in own]
        self._network = task.build(plan).eval()  # dropout off
        put_parameters_(self._network, dict(zip(own, self._vectors, strict=True)))
        for module in self._network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train()

    def learned(self, start_T: Tensor, batches: Iterator[Any], stepped: Callable[[int], None]) -> Tensor:
        """Return the vectors after training, by Adam with a rate that falls to zero."""
        values_T = start_T.clone()
        optimizer = torch.optim.Adam([values_T], lr=float(self.task.learning_rate))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.task.steps)
        for step in range(self.task.steps):
            self._put(values_T)
            found = torch.autograd.grad(self._loss(next(batches)), self._vectors, allow_unused=True)
            each = [torch.zeros_like(v) if g is None else g for g, v in zip(found, self._vectors, strict=True)]
            values_T.grad = torch.cat([gradient.flatten().to(values_T) for gradient in each])
            optimizer.step()
            schedule.step()
            stepped(step + 1)
        return values_T

    @torch.no_grad()
    def distance(self, values_T: Tensor, batch: Any) -> float:
        """Return how far the outputs with these vectors are from the full network's."""
        self._put(values_T)
        return float(self._loss(batch))

    @torch.no_grad()
    def _put(self, values_T: Tensor) -> None:
        parts = values_T.split([vector.numel() for vector in self._vectors])
        for vector, values in zip(self._vectors, parts, strict=True):
            vector.copy_(values.view_as(vector))
        torch.clear_autocast_cache()  # it holds the vectors as they were before

    def _loss(self, batch: Any) -> Tensor:
        task = self.task
        with torch.no_grad():
            full = detached(task.forward(task.teacher, on_device_of(task.teacher, batch)))
        low = run_normalising(task.forward, self._network, on_device_of(self._network, batch), "loader")
        loss = task.distance(low, full)
        if not (isinstance(loss, Tensor) and loss.numel() == 1):
            came = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidArgumentError.about("distance", came, "a tensor of one number", why=f"it gives {came}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            allowed = "forward= and distance= that keep it (no detach, no_grad)"
            raise InvalidArgumentError.about("distance", None, allowed, why="it has no gradient")
        if not bool(torch.isfinite(loss)):
            value, allowed = float(loss.detach()), f"finite inputs, and a learning_rate below {task.learning_rate:g}"
            raise InvalidArgumentError.about("distance", value, allowed, why=f"at {self.size:.3f}x it became {value}")
        return loss


def kl_of_logits(low: Any, full: Any) -> Tensor:
    """Return KL(full ‖ low) of the softmax over the last axis, the mean over all rows."""
    try:
        logits_of(full)
    except InvalidArgumentError as error:
        why = f"the network gives {error.came}"
        raise InvalidArgumentError.about("distance", error.came, str(error.allowed), why=why) from error
    return kl_divergence(low, full)


def with_calibration(report: TuningReport, calibration: CalibrationReport) -> TuningReport:
    """Return the report with what was calibrated afterwards."""
    return replace(report, seconds=report.seconds + calibration.seconds, calibration=calibration)
