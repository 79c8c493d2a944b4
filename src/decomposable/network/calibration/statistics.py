"""Batch normalisation statistics for any size.

A network with fewer bases has other activations, so the running mean and variance of every batch normalisation layer
have to be its own (the paper computes them on the training set for each size). Here that happens once, for a grid of
sizes (`grid.py`): all of them see the same batches, so that statistics of neighbouring sizes differ only by what the
bases between them do. A size that was calibrated itself is taken as it is. One that lies between two is interpolated
layer by layer (`interpolation.py`). `docs/calibration.md` shows how close this comes to calibrating every size on its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from decomposable.core.tracing import Forward
from decomposable.progress import Report, Tracker
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.interpolation import CalibratedSizes, KnownSizes, position
from decomposable_edge.sizing.plans import RankPlan
from decomposable_edge.sizing.rounding import calibrated_as

Build = Callable[[RankPlan], nn.Module]
Ran = Callable[[RankPlan], None]  # told of every batch that the network of a plan has run
Row = dict[str, tuple[Tensor, Tensor]]  # mean and variance by the name of the normalisation layer
Buffers = dict[str, dict[str, Tensor | None]]  # of every normalisation layer


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """What a calibration did and what it costs.

    Attributes:
        sizes: how many were measured.
        batches: how many the loader yielded.
        seconds: how long it took.
        bytes: what all statistics take in memory.
        passes: the multiply-accumulates of it all, in forward passes of the full network over the loader; None where
            they were not counted.
        is_settled: False where a grid was stopped by `passes` before it was as dense as this network needs.
    """

    sizes: int
    batches: int
    seconds: float
    bytes: int
    passes: float | None = None
    is_settled: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibrationTarget:
    """The network to calibrate: how a size of it is made and run, and which layer feeds each normalisation layer."""

    build: Build
    forward: Forward
    layer_before_norm: Mapping[str, str]
    full_plan: RankPlan

    @cached_property
    def original(self) -> dict[str, _BatchNorm]:
        """Its normalisation layers at full size, as they are."""
        return tracked_batch_norms(self.build(self.full_plan))


K = TypeVar("K", bound="InTorch")


@dataclass(frozen=True, kw_only=True, eq=False)
class InTorch(KnownSizes):
    """What is known of sizes, as tensors."""

    original: tuple[Tensor, ...]

    @property
    def bytes(self) -> int:
        """What they take in memory."""
        return sum(getattr(self, table).nbytes for table in self.tables)

    def _mixed(self, low: Tensor, high: Tensor, place_C: NDArray[np.float64]) -> Sequence[Tensor]:
        return torch.lerp(low, high, torch.from_numpy(place_C).to(low)).split(self.channels)

    def of_rows(self: K, rows: Sequence[int]) -> K:
        """These sizes only."""
        tables: dict[str, Any] = {table: getattr(self, table)[list(rows)] for table in self.tables}
        positions, plans = tuple(self.positions[i] for i in rows), tuple(self.plans[i] for i in rows)
        return replace(self, positions=positions, plans=plans, **tables)

    def map(self: K, function: Callable[[Tensor], Tensor]) -> K:
        """The same with `function` applied to the tensors, such as a move to another device."""
        mapped: dict[str, Any] = {table: function(getattr(self, table)) for table in self.tables}
        return replace(self, **mapped, original=tuple(map(function, self.original)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics(InTorch, CalibratedSizes):
    """Mean and variance of all batch normalisation channels for calibrated sizes, in PyTorch."""

    mean_SC: Tensor
    var_SC: Tensor

    def at(self, plan: RankPlan) -> Row | None:
        """Mean and variance of every layer for this size; None for a full size that keeps the original's."""
        mean, var = self.interpolated(plan)
        return {name: (mean[name], var[name]) for name in self.names} if mean else None

    def merged(self, newer: Statistics) -> Statistics:
        """These sizes and newer ones; of a size that both have, the newer one counts."""
        rows = {
            plan.ranks: (place, plan, mean, var)
            for part in (self, newer)
            for place, plan, mean, var in zip(part.positions, part.plans, part.mean_SC, part.var_SC, strict=True)
        }
        places, plans, means, variances = zip(*sorted(rows.values(), key=lambda row: row[0]), strict=True)
        return replace(
            self,
            positions=places,
            plans=plans,
            mean_SC=torch.stack(means),
            var_SC=torch.stack(variances),
            has_explicit_full=self.has_explicit_full or newer.has_explicit_full,
            alignments=tuple(sorted({*self.alignments, *newer.alignments})),
            grids=tuple(sorted({*self.grids, *newer.grids})),
        )


def tracked_batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch normalisation layers that have running statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def measured(subject: CalibrationTarget, plans: Sequence[RankPlan], batches: Iterable[Any], ran: Ran) -> Statistics:
    """The statistics of every plan's network: the average over the batches, in one pass over them."""
    plans = sorted(plans, key=position)

    def seen(index: int, number: int, buffers: Buffers) -> None:
        for name, tensors in buffers.items():
            if not all(bool(torch.isfinite(tensors[kind]).all()) for kind in ("running_mean", "running_var")):  # type: ignore[arg-type]
                raise InvalidArgumentError(  # every later result would be none
                    f"calibrate_: batch {number} gives '{name}' statistics that are NaN or infinite; allowed: finite "
                    "inputs"
                )
        ran(plans[index])

    rows = averaged([partial(subject.build, plan) for plan in plans], subject.forward, batches, seen)
    return as_statistics(subject, plans, rows)


def as_statistics(subject: CalibrationTarget, plans: Sequence[RankPlan], rows: Sequence[Row]) -> Statistics:
    """What was found for each plan, in one table."""
    names = tuple(rows[0])
    mean, var = (torch.stack([torch.cat([row[name][i] for name in names]) for row in rows]) for i in (0, 1))
    buffers = [subject.original[name] for name in names]
    return Statistics(
        names=names,
        channels=tuple(len(rows[0][name][0]) for name in names),
        layer_before_norm=tuple(map(subject.layer_before_norm.get, names)),
        positions=tuple(map(position, plans)),
        plans=tuple(plans),
        mean_SC=mean,
        var_SC=var,
        has_explicit_full=False,
        full_plan=subject.full_plan,
        alignments=tuple(sorted({calibrated_as(plan.align) for plan in plans})),
        original=(torch.cat([b.running_mean for b in buffers]), torch.cat([b.running_var for b in buffers])),  # type: ignore[misc]
    )


@torch.no_grad()
def averaged(
    builds: Sequence[Callable[[], nn.Module]],
    forward: Forward,
    batches: Iterable[Any],
    seen: Callable[[int, int, Buffers], None] | None = None,
    asker: str = "calibrate_",
) -> list[Row]:
    """For each of some networks the average of the batches' means and variances, in one pass over the batches.

    Every normalisation layer uses its batch's own meanwhile, as in training. One of several networks is built for every
    batch anew, so that one of them is there at a time; its normalisation layers and their buffers are written to.
    `seen` is told which network has run which batch, and of the buffers so far.
    """
    kept: list[Buffers] = [{} for _ in builds]
    number = 0
    if len(builds) == 1:
        builds = [cache(builds[0])]
    for number, batch in enumerate(batches, start=1):
        for index, (build, buffers) in enumerate(zip(builds, kept, strict=True)):
            network = build().eval()  # dropout off
            for name, norm in tracked_batch_norms(network).items():
                norm.momentum = None  # torch's own cumulative average
                if name in buffers:
                    norm._buffers = buffers[name]
                else:
                    norm.reset_running_stats()
                    buffers[name] = norm._buffers
                norm.train()
            run_normalising(forward, network, batch, asker)
            if seen is not None:
                seen(index, number, buffers)
    if not number:
        raise InvalidArgumentError("calibration: there is no batch; allowed: at least one")
    return [{n: (b["running_mean"], b["running_var"]) for n, b in buffers.items()} for buffers in kept]  # type: ignore[misc]


def run_normalising(forward: Forward, network: nn.Module, batch: Any, asker: str = "calibrate_") -> Any:
    """What a network gives whose batch normalisation uses the batch's own statistics."""
    try:
        return forward(network, batch)
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            raise InvalidArgumentError(
                f"{asker}: a batch holds one sample, which has no variance; allowed: larger ones (drop_last=True)"
            ) from error
        raise


@torch.no_grad()
def measured_exactly(
    subject: CalibrationTarget, plans: Sequence[RankPlan], batches: Iterable[Any], report: Report
) -> Statistics:
    """The same in the authors' way: each layer from a pass over all the data, those before it fixed."""
    plans = sorted(plans, key=position)
    rows: list[Row] = []
    tracker = Tracker(report, "calibrating", total=len(plans), unit="sizes")
    for plan in plans:
        network = subject.build(plan).eval()
        norms = tracked_batch_norms(network)
        names = _in_order_of_use(network, norms, batches, subject.forward)
        for i, name in enumerate(names):
            tracker.update(len(rows) + i / len(names), f"'{name}' of {position(plan):.3f}x")
            mean, var = _data_statistics(network, norms[name], batches, subject.forward)
            norms[name].running_mean, norms[name].running_var = mean, var
        rows.append({name: (norm.running_mean, norm.running_var) for name, norm in norms.items()})  # type: ignore[misc]
    return as_statistics(subject, plans, rows)


def _in_order_of_use(
    network: nn.Module, norms: Mapping[str, _BatchNorm], batches: Iterable[Any], forward: Forward
) -> list[str]:
    used: dict[str, None] = {}
    hooks = [
        norm.register_forward_pre_hook(lambda *_, name=name: used.setdefault(name)) for name, norm in norms.items()
    ]
    forward(network, next(iter(batches)))
    for hook in hooks:
        hook.remove()
    return list(used)


class _Reached(Exception):
    """Raised to end a forward pass at the layer that it was run for."""


def _data_statistics(
    network: nn.Module, norm: _BatchNorm, batches: Iterable[Any], forward: Forward
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel of what enters one layer, over all the data."""
    assert norm.running_mean is not None
    count, number = 0, 0
    total = torch.zeros(norm.num_features, dtype=torch.float64)
    squares = torch.zeros_like(total)

    def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal count, number, total, squares
        number += 1
        channels_first = args[0].detach().transpose(0, 1).flatten(1).double() if args[0].dim() > 1 else args[0][:, None]
        if not bool(torch.isfinite(channels_first).all()):
            raise InvalidArgumentError(f"calibrate_: batch {number} gives NaN or infinity; allowed: finite inputs")
        count += channels_first.shape[1]
        total += channels_first.sum(1).cpu()
        squares += channels_first.square().sum(1).cpu()
        raise _Reached

    hook = norm.register_forward_pre_hook(see)
    try:
        for batch in batches:
            with suppress(_Reached):
                forward(network, batch)
    finally:
        hook.remove()
    mean = total / max(1, count)
    variance = (squares / max(1, count) - mean.square()).clamp_min(0)
    return mean.to(norm.running_mean), variance.to(norm.running_mean)
