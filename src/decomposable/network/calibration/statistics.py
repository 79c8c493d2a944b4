"""Batch normalisation statistics for any size.

A network with fewer bases has other activations, so every batch normalisation layer needs a mean and variance of its
own at each size (the paper computes them on the training set for each). Here that happens once, for a grid of sizes
(`grid.py`) that all see the same batches, so that neighbours differ only by the bases between them. A calibrated size
is taken as it is, one between two is interpolated layer by layer (`sizing/interpolation.py`). `docs/calibration.md`
shows how close this comes to calibrating every size on its own.
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
        """Return the network's normalisation layers at full size."""
        return tracked_batch_norms(self.build(self.full_plan))


K = TypeVar("K", bound="InTorch")


@dataclass(frozen=True, kw_only=True, eq=False)
class InTorch(KnownSizes):
    """What is known of sizes, as tensors."""

    original: tuple[Tensor, ...]

    @property
    def bytes(self) -> int:
        """Return how much memory the statistics take."""
        return sum(getattr(self, table).nbytes for table in self.tables)

    def _mixed(self, low: Tensor, high: Tensor, place_C: NDArray[np.float64]) -> Sequence[Tensor]:
        return torch.lerp(low, high, torch.from_numpy(place_C).to(low)).split(self.channels)

    def of_rows(self: K, rows: Sequence[int]) -> K:
        """Return these sizes only."""
        tables: dict[str, Any] = {table: getattr(self, table)[list(rows)] for table in self.tables}
        positions, plans = tuple(self.positions[i] for i in rows), tuple(self.plans[i] for i in rows)
        return replace(self, positions=positions, plans=plans, **tables)

    def map(self: K, function: Callable[[Tensor], Tensor]) -> K:
        """Return the same with `function` applied to the tensors, such as a move to another device."""
        mapped: dict[str, Any] = {table: function(getattr(self, table)) for table in self.tables}
        return replace(self, **mapped, original=tuple(map(function, self.original)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics(InTorch, CalibratedSizes):
    """Mean and variance of all batch normalisation channels for calibrated sizes, in PyTorch."""

    mean_SC: Tensor
    var_SC: Tensor

    def at(self, plan: RankPlan) -> Row | None:
        """Return mean and variance of every layer for this size; None for a full size that keeps the original's."""
        mean, var = self.interpolated(plan)
        return {name: (mean[name], var[name]) for name in self.names} if mean else None

    def merged(self, newer: Statistics) -> Statistics:
        """Return these sizes and newer ones; of a size that both have, the newer one counts."""
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
    """Return the batch normalisation layers that have running statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def as_statistics(subject: CalibrationTarget, plans: Sequence[RankPlan], rows: Sequence[Row]) -> Statistics:
    """Return what was found for each plan in one table."""
    plans, rows = zip(*sorted(zip(plans, rows, strict=True), key=lambda pair: position(pair[0])), strict=True)
    names = tuple(rows[0])
    mean, var = (torch.stack([torch.cat([row[name][i] for name in names]) for row in rows]) for i in (0, 1))
    buffers = [subject.original[name] for name in names]
    return Statistics(
        names=names,
        channels=tuple(len(rows[0][name][0]) for name in names),
        layer_before_norm=tuple(map(subject.layer_before_norm.get, names)),
        positions=tuple(map(position, plans)),
        plans=plans,
        mean_SC=mean,
        var_SC=var,
        has_explicit_full=any(plan.is_full for plan in plans),
        full_plan=subject.full_plan,
        alignments=tuple(sorted({calibrated_as(plan.align) for plan in plans})),
        original=(torch.cat([b.running_mean for b in buffers]), torch.cat([b.running_var for b in buffers])),  # type: ignore[misc]
    )


def measured(subject: CalibrationTarget, plans: Sequence[RankPlan], batches: Iterable[Any], ran: Ran) -> list[Row]:
    """Return the statistics of every plan's network: the average over the batches, in one pass over them."""

    def seen(index: int, number: int, buffers: Buffers) -> None:
        for name, found in buffers.items():
            if not bool(torch.isfinite(found["running_mean"] + found["running_var"]).all()):  # type: ignore[operator]
                # every later result would be none
                why = f"batch {number} gives statistics that are NaN or infinite"
                raise InvalidArgumentError.about("loader", number, "finite inputs", why=why, layer=name)
        ran(plans[index])

    return averaged([partial(subject.build, plan) for plan in plans], subject.forward, batches, seen)


@torch.no_grad()
def averaged(
    builds: Sequence[Callable[[], nn.Module]],
    forward: Forward,
    batches: Iterable[Any],
    seen: Callable[[int, int, Buffers], None] | None = None,
    option: str = "loader",
) -> list[Row]:
    """Return for each network the average of the batches' means and variances, in one pass over the batches.

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
            run_normalising(forward, network, batch, option)
            if seen is not None:
                seen(index, number, buffers)
    if not number:
        raise InvalidArgumentError.about("loader", 0, "at least one batch", why="it yielded none")
    return [{n: (b["running_mean"], b["running_var"]) for n, b in buffers.items()} for buffers in kept]  # type: ignore[misc]


def run_normalising(forward: Forward, network: nn.Module, batch: Any, option: str = "loader") -> Any:
    """Return what a network gives whose batch normalisation uses the batch's own statistics."""
    try:
        return forward(network, batch)
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            why, allowed = "a batch holds one sample, which has no variance", "larger ones (drop_last=True)"
            raise InvalidArgumentError.about(option, 1, allowed, why=why) from error
        raise


@torch.no_grad()
def measured_exactly(
    subject: CalibrationTarget, plans: Sequence[RankPlan], batches: Iterable[Any], report: Report
) -> list[Row]:
    """Return the same in the authors' way: each layer from a pass over all the data, those before it fixed."""
    rows: list[Row] = []
    tracker = Tracker(report, "calibrating", total=len(plans), unit="sizes")
    for plan in plans:
        network = subject.build(plan).eval()
        norms = tracked_batch_norms(network)
        rest = dict(norms)
        while rest and (name := _fix_next_(network, rest, batches, subject.forward)) is not None:
            del rest[name]
            tracker.update(len(rows) + 1 - len(rest) / len(norms), f"'{name}' of {position(plan):.3f}x")
        rows.append({name: (norm.running_mean, norm.running_var) for name, norm in norms.items()})  # type: ignore[misc]
    return rows


class _Reached(Exception):
    """Raised to end a forward pass at the layer that it was run for."""


def _fix_next_(
    network: nn.Module, norms: Mapping[str, _BatchNorm], batches: Iterable[Any], forward: Forward
) -> str | None:
    """Give the one of these layers that runs first mean and biased variance of all the data; return its name."""
    first: list[str] = []
    count = 0
    total = squares = torch.zeros(())

    def see(name: str, x: Tensor) -> None:
        nonlocal count, total, squares
        if name != (first or [name])[0]:
            return
        first[:] = [name]
        channels_first = x.detach().transpose(0, 1).flatten(1).double()
        if not bool(torch.isfinite(channels_first).all()):
            why = f"batch {number} gives NaN or infinity"
            raise InvalidArgumentError.about("loader", number, "finite inputs", why=why)
        count += channels_first.shape[1]
        total = total + channels_first.sum(1).cpu()
        squares = squares + channels_first.square().sum(1).cpu()
        raise _Reached

    hooks = [
        norm.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0])) for name, norm in norms.items()
    ]
    try:
        for number, batch in enumerate(batches, start=1):  # noqa: B007 - `see` says which one
            with suppress(_Reached):
                forward(network, batch)
    finally:
        for hook in hooks:
            hook.remove()
    for name in first:
        buffers, mean = norms[name]._buffers, total / count
        values = {"running_mean": mean, "running_var": (squares / count - mean.square()).clamp_min(0)}
        buffers.update({kind: value.to(buffers[kind]) for kind, value in values.items()})
    return next(iter(first), None)
