"""Accuracy of a network, and of a decomposed network at many sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decomposable.core.processes import ALONE, Processes, same_buffers_
from decomposable.data.base import Data, TestBatches, has_labels
from decomposable.network.decomposed import DecomposedNet
from decomposable.progress import Report, Tracker
from decomposable.recipes.settings import Settings
from decomposable.training.methods.base import HasOwnSizes
from decomposable_edge.errors import DecomposableError
from decomposable_edge.sizing.chain import flat_ranks
from decomposable_edge.sizing.plans import RankPlan


class WrongDataError(DecomposableError):
    """The network and the data do not go together."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A network at one size; `size` is what was asked for, the rest what it came to."""

    size: float
    macs: int | None
    params: int
    macs_fraction: float | None
    params_fraction: float
    ranks: tuple[int, int] | None  # the smallest and the largest, where the network is decomposed
    accuracy: float | None  # percent; None where it was not measured
    curve: str = ""  # which of several, where one training or method gives more than one
    perplexity: float | None = None  # of a text

    @classmethod
    def of(
        cls, size: float, plan: Any, accuracy: float | None, curve: str = "", perplexity: float | None = None
    ) -> Row:
        """Return the row of a plan, or of another size with the same four costs."""
        ranks = flat_ranks(plan.ranks) if isinstance(plan, RankPlan) else ()
        extremes = (min(ranks), max(ranks)) if ranks else None
        costs = {name: getattr(plan, name) for name in ("macs", "params", "macs_fraction", "params_fraction")}
        return cls(size=size, **costs, ranks=extremes, accuracy=accuracy, curve=curve, perplexity=perplexity)

    def as_dict(self) -> dict[str, Any]:
        """Return it for a record; only a text has a perplexity."""
        return {name: value for name, value in asdict(self).items() if name != "perplexity" or value is not None}


class Judged(NamedTuple):
    """Percent of the labels that were right and, of a text, exp of the mean cross-entropy over all positions."""

    accuracy: float
    perplexity: float | None = None


def accuracy(net: nn.Module, data: Data, **how: Any) -> float:
    """Return the percentage of test images whose class has the highest output (top-1); `how` as in `judged`."""
    return judged(net, data, **how).accuracy


@torch.no_grad()
def judged(
    net: nn.Module, data: Data, *, batch_size: int = 250, workers: int = 0, processes: Processes = ALONE
) -> Judged:
    """Test a network in one pass; processes that share a run share the test images."""
    if not are_labelled(data):
        allowed = "labelled ones, or agreement in place of accuracy"
        raise WrongDataError.about("data", None, allowed, why="the test images have no labels")
    is_text = data.test_batch(torch.arange(min(1, data.test_count)))[1].dim() > 1
    place = (processes.index, processes.count)

    def count() -> tuple[None, list[float]]:
        right, labels, total = 0, 0, 0.0
        for outputs, y in _outputs(net, data, batch_size=batch_size, workers=workers, place=place):
            right, labels = right + int((outputs.argmax(dim=1) == y).sum()), labels + len(y)
            total += float(F.cross_entropy(outputs.float(), y, reduction="sum")) if is_text else 0.0
        return None, [right, labels, total]

    same_buffers_(net, processes)
    _, (right, labels, total) = processes.summed(count, 3)
    return Judged(100 * right / labels, math.exp(total / labels) if is_text else None)


def are_labelled(data: Data) -> bool:
    """Return whether the classes of the test images are known."""
    return data.test_count == 0 or has_labels(data.test_batch(torch.arange(1)))


@torch.no_grad()
def answers(net: nn.Module, data: Data, **how: Any) -> Tensor:
    """Return the class with the highest output for every test image."""
    return torch.cat([outputs.argmax(dim=1) for outputs, _ in _outputs(net, data, **how)])


def _outputs(
    net: nn.Module, data: Data, *, batch_size: int = 250, workers: int = 0, place: tuple[int, int] = (0, 1)
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the outputs for every batch of test images, a row for every label, and the labels."""
    was_training = net.training
    net.eval()
    device = next((parameter.device for parameter in net.parameters()), torch.device("cpu"))
    for x, y in TestBatches(data, batch_size=batch_size).loader(*place, workers=workers):
        outputs = net(x.to(device))
        check_outputs(outputs, data.classes)
        yield outputs.cpu(), y.flatten()
    net.train(was_training)


def check_outputs(outputs: Any, classes: int) -> None:
    """Refuse a network whose outputs are not one number for each class."""
    if not isinstance(outputs, Tensor):
        kind, allowed = type(outputs).__name__, "a tensor, one number for each class"
        raise WrongDataError.about("network", kind, allowed, why=f"it gives a {kind}")
    shape = tuple(outputs.shape)
    if len(shape) != 2 or shape[1] != classes:
        came = f"{shape[1]} classes" if len(shape) == 2 else f"outputs of shape {shape}"
        text = f"the network has {came}, the data has {classes}; allowed: the same number"
        raise WrongDataError.about("network", came, "the same number", text)


def measure(
    net: Any,
    data: Data,
    settings: Settings,
    *,
    curve: str,
    report: Report,
    judge: Callable[[nn.Module], Judged] | None = None,
) -> list[Row]:
    """Judge a network at every size that it has, by default by its accuracy; it keeps the size it had.

    A decomposed network has the sizes of the settings, as far as it can be so small. Any other says which it has.
    """
    judge = judge or partial(judged, data=data, batch_size=settings.batch_size, workers=settings.workers)
    wanted: list[tuple[float, Any]]
    if isinstance(net, DecomposedNet):
        selector, at = net.selector, net.extract  # a copy, which does not warn at every size
        sizes = [size for size in settings.sizes if size >= selector.smallest_size]
        wanted = [(size, net.plan(**{selector.measure: size})) for size in sizes]  # type: ignore[arg-type]
    else:
        before, at, wanted = net.plan(), partial(_resized, net), net.offered()
    rows = []
    tracker = Tracker(report, "measuring", total=len(wanted), unit="sizes")
    for i, (size, plan) in enumerate(wanted):
        tracker.update(i, f"now {size:.4g}")
        found = judge(at(plan))
        rows.append(Row.of(size, plan, found.accuracy, curve, found.perplexity))
    if not isinstance(net, DecomposedNet):
        net.resize_(before)
    return rows


def _resized(net: HasOwnSizes, plan: Any) -> nn.Module:
    net.resize_(plan)
    return cast(nn.Module, net)


def smallest_within(rows: Sequence[Row], drop: float) -> Row | None:
    """Return the smallest measured size that loses at most `drop` points against the largest one measured."""
    measured = sorted((row for row in rows if row.accuracy is not None), key=lambda row: row.size)
    if not measured:
        return None
    least = (measured[-1].accuracy or 0.0) - drop - 1e-9  # rounding is no loss
    return next(row for row in measured if (row.accuracy or 0.0) >= least)
