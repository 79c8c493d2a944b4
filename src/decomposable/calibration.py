"""Batch normalisation statistics for any size.

A network with fewer bases has other activations, so the running mean and variance of every batch normalisation layer
have to be its own (the paper computes them on the training set for each size). Here that happens once, for a grid of
sizes: all of them see the same batches in one pass over the data, so that the statistics of neighbouring sizes differ
only by what the bases between them do. A size that was calibrated itself is taken as it is. One that lies between two
is interpolated layer by layer (`interpolation.py`). `docs/calibration.md` shows how close this comes to calibrating
every size on its own.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from decomposable.errors import InvalidArgumentError
from decomposable.interpolation import CalibratedSizes, position
from decomposable.ranks import RankPlan
from decomposable.tracing import Forward

Build = Callable[[RankPlan], nn.Module]


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """What a calibration did and what it costs."""

    sizes: int
    batches: int
    seconds: float
    bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics(CalibratedSizes):
    """Mean and variance of all batch normalisation channels, laid end to end, for calibrated sizes, smallest first."""

    mean_SC: Tensor
    var_SC: Tensor
    original: tuple[Tensor, Tensor]  # mean and variance of the original network, the end of every interpolation

    @property
    def bytes(self) -> int:
        """What they take in memory."""
        return sum(t.numel() * t.element_size() for t in (self.mean_SC, self.var_SC))

    def at(self, plan: RankPlan) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Mean and variance of every layer for this size; None for a full size that keeps the original's."""
        found = self.between(plan)
        if found is None:
            return None
        below, above = self._row(found.lower), self._row(found.upper)
        place_C = torch.from_numpy(found.place_C).to(self.mean_SC)
        return self._named(*(torch.lerp(low, high, place_C) for low, high in zip(below, above, strict=True)))

    def _row(self, index: int) -> tuple[Tensor, Tensor]:
        """A calibrated size; behind the last one comes the original."""
        if index == len(self.plans):
            return self.original
        return self.mean_SC[index], self.var_SC[index]

    def _named(self, mean_C: Tensor, var_C: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        pairs = zip(mean_C.split(self.channels), var_C.split(self.channels), strict=True)
        return dict(zip(self.names, pairs, strict=True))

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
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Statistics:
        """The same with `function` applied to the tensors, such as a move to another device."""
        mean, var = self.original
        moved = function(self.mean_SC), function(self.var_SC)
        return replace(self, mean_SC=moved[0], var_SC=moved[1], original=(function(mean), function(var)))


def default_grid(smallest: float) -> list[float]:
    """Fractions of the original to calibrate: 1% apart down to 0.3, 0.5% down to 0.1, 10% below, and the two ends.

    The fewer bases are left, the more each of them matters. The full size is measured as the end to interpolate
    towards; the full network keeps the original's statistics.
    """
    fractions, fraction = [], 1.0
    while fraction > smallest:
        fractions.append(fraction)
        fraction *= 0.99 if fraction > 0.3 else 0.995 if fraction > 0.1 else 0.9
    return [*fractions, smallest]


def tracked_batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch normalisation layers that have running statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def calibrate(
    build: Build,
    plans: Sequence[RankPlan],
    loader: Iterable[Any],
    forward: Forward,
    *,
    exact: bool,
    feeders: Mapping[str, str],
    has_explicit_full: bool,
    full_plan: RankPlan,
) -> tuple[Statistics, int]:
    """Measure the statistics of every plan's network; also returns the number of batches seen."""
    plans = sorted(plans, key=position)
    measure = _layer_by_layer if exact else _cumulative_average
    rows, batches = measure(build, plans, loader, forward)
    if batches == 0:
        raise InvalidArgumentError("calibrate_: the loader yielded no batch; allowed: at least one")
    names = tuple(rows[0])
    original = tracked_batch_norms(build(full_plan))
    return (
        Statistics(
            names=names,
            channels=tuple(len(rows[0][name][0]) for name in names),
            feeders=tuple(map(feeders.get, names)),
            positions=tuple(map(position, plans)),
            plans=tuple(plans),
            mean_SC=torch.stack([torch.cat([row[name][0] for name in names]) for row in rows]),
            var_SC=torch.stack([torch.cat([row[name][1] for name in names]) for row in rows]),
            has_explicit_full=has_explicit_full,
            full_plan=full_plan,
            alignments=tuple(sorted({plan.align for plan in plans if plan.align != "auto"})),
            original=(
                torch.cat([original[name].running_mean for name in names]),  # type: ignore[misc]
                torch.cat([original[name].running_var for name in names]),  # type: ignore[misc]
            ),
        ),
        batches,
    )


Row = dict[str, tuple[Tensor, Tensor]]


@torch.no_grad()
def _cumulative_average(
    build: Build, plans: Sequence[RankPlan], loader: Iterable[Any], forward: Forward
) -> tuple[list[Row], int]:
    """Average of the batches' means and variances, every normalisation layer using its batch's own as in training."""
    buffers: list[dict[str, dict[str, Tensor | None]]] = [{} for _ in plans]
    batches = 0
    watch = Stopwatch()
    for batch in loader:
        if batches == 1 and isinstance(loader, Sized):
            _warn_if_long(watch.seconds * len(loader), len(plans), f"{len(loader)} batches")
        for plan, kept in zip(plans, buffers, strict=True):
            network = build(plan).eval()
            for name, norm in tracked_batch_norms(network).items():
                norm.momentum = None  # torch's own cumulative average
                if name in kept:
                    norm._buffers = kept[name]
                else:
                    norm.reset_running_stats()
                    kept[name] = norm._buffers
                norm.train()
            _run_for_statistics(forward, network, batch)
        batches += 1
    rows: list[Row] = [{n: (b["running_mean"], b["running_var"]) for n, b in kept.items()} for kept in buffers]  # type: ignore[misc]
    return rows, batches


def _run_for_statistics(forward: Forward, network: nn.Module, batch: Any) -> None:
    try:
        forward(network, batch)
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            raise InvalidArgumentError(
                "calibrate_: a batch holds one sample, which has no variance; allowed: larger ones (drop_last=True)"
            ) from error
        raise


def _warn_if_long(seconds: float, sizes: int, data: str) -> None:
    """Say so early: a few thousand samples give the same statistics as a whole training set."""
    if seconds > 600:
        warnings.warn(
            f"calibrating {sizes} sizes with {data} takes about {seconds / 60:.0f} minutes; a few thousand samples are "
            "enough, and sizes=[...] calibrates fewer sizes",
            stacklevel=5,
        )


class _Reached(Exception):
    """Raised to end a forward pass at the layer that it was run for."""


@torch.no_grad()
def _layer_by_layer(
    build: Build, plans: Sequence[RankPlan], loader: Iterable[Any], forward: Forward
) -> tuple[list[Row], int]:
    """The authors' way: each layer from a pass over all the data, those before it fixed; biased variance."""
    if iter(loader) is loader:
        raise InvalidArgumentError("calibrate_(exact=True): got an iterator; allowed: a loader to be run many times")
    rows: list[Row] = []
    batches = 0
    watch = Stopwatch()
    for plan in plans:
        if len(rows) == 1:
            _warn_if_long(watch.seconds * len(plans), len(plans), "a pass for each layer of each size")
        network = build(plan).eval()
        norms = tracked_batch_norms(network)
        for name in _in_order_of_use(network, norms, loader, forward):
            mean, var, batches = _data_statistics(network, norms[name], loader, forward)
            norms[name].running_mean, norms[name].running_var = mean, var
        rows.append({name: (norm.running_mean, norm.running_var) for name, norm in norms.items()})  # type: ignore[misc]
    return rows, batches


def _in_order_of_use(
    network: nn.Module, norms: Mapping[str, _BatchNorm], loader: Iterable[Any], forward: Forward
) -> list[str]:
    used: dict[str, None] = {}
    hooks = [
        norm.register_forward_pre_hook(lambda *_, name=name: used.setdefault(name)) for name, norm in norms.items()
    ]
    for batch in loader:
        forward(network, batch)
        break
    for hook in hooks:
        hook.remove()
    return list(used)


def _data_statistics(
    network: nn.Module, norm: _BatchNorm, loader: Iterable[Any], forward: Forward
) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance per channel of what enters one layer, over all the data."""
    assert norm.running_mean is not None
    count, batches = 0, 0
    total = torch.zeros(norm.num_features, dtype=torch.float64)
    squares = torch.zeros_like(total)

    def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal count, total, squares
        channels_first = args[0].detach().transpose(0, 1).flatten(1).double() if args[0].dim() > 1 else args[0][:, None]
        count += channels_first.shape[1]
        total += channels_first.sum(1).cpu()
        squares += channels_first.square().sum(1).cpu()
        raise _Reached

    hook = norm.register_forward_pre_hook(see)
    try:
        for batch in loader:
            batches += 1
            try:
                forward(network, batch)
            except _Reached:
                continue
    finally:
        hook.remove()
    mean = total / max(1, count)
    variance = (squares / max(1, count) - mean.square()).clamp_min(0)
    return mean.to(norm.running_mean), variance.to(norm.running_mean), batches


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long ago that was."""
        return time.perf_counter() - self._start
