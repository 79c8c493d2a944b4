"""Judge a cut by data on images that it has not seen, beside a cut by singular values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from decomposable.core.moments import samples_in
from decomposable.core.tracing import Forward
from decomposable.network.calibration.statistics import run_normalising, tracked_batch_norms
from decomposable.network.goals import Goal, Readings
from decomposable_edge.errors import InvalidArgumentError

SEARCHED_WITH = 128
"""The most samples, in whole batches, that choose how a cut is shared out."""

COMPARED_WITH = 192
"""The most samples, in whole batches, that compare two cuts; of halves, both together."""

MOST_READ = 1 << 28
"""Bytes of the full network's outputs that are held, beyond those of one batch: 256 MiB."""

SIZES = (0.9, 0.75, 0.5, 0.35, 0.25, 0.12)
"""Sizes at which they are compared."""


def sizes_to_judge(smallest: float) -> list[float]:
    """Return the sizes to compare at; for a network that has none of them, the one half-way to its smallest.

    >>> sizes_to_judge(0.4), sizes_to_judge(0.95)
    ([0.9, 0.75, 0.5], [0.975])
    """
    return [size for size in SIZES if size > smallest] or [(1 + smallest) / 2]


@dataclass(frozen=True, kw_only=True)
class JudgedSize:
    """How far two networks of one size are from the full one: cut by data, and by singular values."""

    size: float
    by_data: float
    by_weights: float


@dataclass(frozen=True, kw_only=True)
class CutReport:
    """What a cut by data was measured and judged with, and what was kept of it.

    Attributes:
        criterion: "loss" or "output".
        unit: of the distances.
        measured_with: samples that measured bases and losses.
        judged_with: other samples, which compared the two cuts.
        sizes: the distances of both to the full network.
        kept: "data"; or "weights" if data were no better: then bases and order are those of the singular values.
        is_crossed: whether the samples were so few that two halves judged each other.
        layers_by_weights: layers that keep the bases of their singular values, because data would have cut them worse.
    """

    criterion: str
    unit: str
    measured_with: int = 0
    judged_with: int = 0
    sizes: tuple[JudgedSize, ...] = ()
    kept: str
    is_crossed: bool = False
    layers_by_weights: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        judged = "two halves judged each other" if self.is_crossed else f"{self.judged_with} others judged"
        if not self.sizes:
            return f"bases by {self.kept}: nothing could be judged"
        lines = [
            f"bases by {self.kept}, criterion {self.criterion}: {self.measured_with} samples measured, {judged}",
            f"{self.unit} to the full network:",
            f"{'size':>6} {'by data':>10} {'by weights':>10}",
            *(f"{each.size:>6g} {each.by_data:>10.4g} {each.by_weights:>10.4g}" for each in self.sizes),
        ]
        worse = [f"{each.size:g}" for each in self.sizes if each.by_data > each.by_weights]
        if worse and self.kept == "data":
            lines.append(f"better by weights at {', '.join(worse)}, but not over all sizes")
        if self.layers_by_weights:
            lines.append(f"layers that are cut by their weights: {', '.join(self.layers_by_weights)}")
        return "\n".join(lines)


def prefers_weights(sizes: Sequence[JudgedSize]) -> bool:
    """Return whether singular values do better over all sizes: by the mean logarithm of the distances' ratio.

    One order serves all sizes, because a size contains every smaller one. So every size counts the same: half the
    distance at one size makes up for twice the distance at another. An order that is five times as near at 0.9 is kept,
    even if it is slightly worse where both have lost nearly everything. NaN counts as infinite.
    """
    ratios = [math.log(_positive(each.by_data) / _positive(each.by_weights)) for each in sizes]
    return sum(ratios) > 0


def _positive(distance: float) -> float:
    return min(max(distance, 1e-12), 1e12) if distance == distance else 1e12


@dataclass(frozen=True, eq=False)
class Judge:
    """Some batches, and what the full network gives for them."""

    batches: tuple[Any, ...]
    full: tuple[Readings, ...]
    forward: Forward
    goal: Goal

    @classmethod
    def of(cls, network: nn.Module, batches: Sequence[Any], forward: Forward, goal: Goal) -> Judge:
        """Return a judge that knows this network; with fewer batches if its outputs take more than `MOST_READ`."""
        full: list[Readings] = []
        held = 0
        for readings in _readings(network, batches, forward, goal):
            held += sum(each.nbytes for each in readings)
            if full and held > MOST_READ:
                break
            full.append(readings)
        return cls(tuple(batches[: len(full)]), tuple(full), forward, goal)

    @property
    def samples(self) -> int:
        """Return how many samples it has."""
        return sum(map(samples_in, self.batches))

    def first(self, most: int) -> Judge:
        """Return a judge with at most so many samples, but with one batch at least."""
        held = accumulate(map(samples_in, self.batches))
        count = max(1, sum(total <= most for total in held))
        return Judge(self.batches[:count], self.full[:count], self.forward, self.goal)

    def distance(self, network: nn.Module) -> float:
        """Return how far a network is from the full one, the mean over all rows."""
        pairs = zip(_readings(network, self.batches, self.forward, self.goal), self.full, strict=True)
        found = [self.goal.distances(low, _shaped_as(low, full)) for low, full in pairs]
        return float(torch.cat(found).double().mean()) if found else math.nan


def _shaped_as(low: Readings, full: Readings) -> Readings:
    """Return what the full network gives; refuse a cut network whose outputs have other shapes."""
    for number, (one, other) in enumerate(zip(low, full, strict=True), 1):
        if one.shape != other.shape:
            came, right = tuple(one.shape), tuple(other.shape)
            why = f"output {number} of a cut network has shape {came} where the full one's has {right}"
            allowed = "outputs whose shape does not depend on the numbers, by forward="
            raise InvalidArgumentError.about("data", came, allowed, why=why)
    return full


@torch.no_grad()
def _readings(network: nn.Module, batches: Sequence[Any], forward: Forward, goal: Goal) -> Iterator[Readings]:
    """Yield what a goal reads of every batch.

    Batch normalisation uses the statistics of each batch, because a cut network has no others yet. In the full network,
    too: so the two differ by nothing but the cut.
    """
    with _by_batch(network):
        for batch in batches:
            yield goal.read(run_normalising(forward, network, batch, option="data"))


@contextmanager
def _by_batch(network: nn.Module) -> Iterator[None]:
    """Take the running statistics away from batch normalisation, so that it uses those of each batch."""
    kept = [(norm, norm._buffers) for norm in tracked_batch_norms(network).values()]
    for norm, buffers in kept:
        norm._buffers = buffers | dict.fromkeys(("running_mean", "running_var", "num_batches_tracked"))
    try:
        yield
    finally:
        for norm, buffers in kept:
            norm._buffers = buffers
