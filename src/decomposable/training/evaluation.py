"""Accuracy of a network, and of a decomposed network at many sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
        cls,
        size: float,
        plan: Any,
        accuracy: float | None,
        curve: str = "",
        perplexity: float | None = None,
    ) -> Row:
        """Return the row of a plan, or of another size with the same four costs."""
        ranks = flat_ranks(plan.ranks) if isinstance(plan, RankPlan) else ()
        extremes = (min(ranks), max(ranks)) if ranks else None
        costs = {name: getattr(plan, name) for name in ("macs", "params", "macs_fraction", "params_fraction")}
        return cls(size=size, **costs, ranks=extremes, accuracy=accuracy, curve=curve, perplexity=perplexity)

    def as_dict(self) -> dict[str, Any]:
        """For a record; of images nobody asks for a perplexity."""
        return {name: value for name, value in asdict(self).items() if name != "perplexity" or value is not None}


class Judged(NamedTuple):
    """Percent of the labels that were right and, of a text, exp of the mean cross-entropy over all positions."""

    accuracy: float
    perplexity: float | None


def accuracy(
    net: nn.Module, data: Data, *, batch_size: int = 250, workers: int = 0, processes: Processes = ALONE
) -> float:
    """Percent of the test images whose class has the highest output (top-1); processes that share a run share them."""
    return judged(net, data, batch_size=batch_size, workers=workers, processes=processes).accuracy


@torch.no_grad()
def judged(
    net: nn.Module, data: Data, *, batch_size: int = 250, workers: int = 0, processes: Processes = ALONE
) -> Judged:
    """The same, and where a sample has a label at every position the perplexity, from one pass."""
    if not are_labelled(data):
        raise WrongDataError(
            "data: the test images have no labels; allowed: labelled ones, or agreement in place of accuracy"
        )
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
    """Whether anybody knows the classes of the test images."""
    return data.test_count == 0 or has_labels(data.test_batch(torch.arange(1)))


@torch.no_grad()
def answers(net: nn.Module, data: Data, *, batch_size: int = 250, workers: int = 0) -> Tensor:
    """What a network says of every test image: the class with the highest output."""
    found = _outputs(net, data, batch_size=batch_size, workers=workers)
    return torch.cat([outputs.argmax(dim=1) for outputs, _ in found])


def _outputs(
    net: nn.Module, data: Data, *, batch_size: int, workers: int, place: tuple[int, int] = (0, 1)
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of every batch of test images a row of outputs for every label, and the labels."""
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
        raise WrongDataError(
            f"the network gives a {type(outputs).__name__}; allowed: a tensor, one number for each class"
        )
    shape = tuple(outputs.shape)
    if len(shape) != 2 or shape[1] != classes:
        came = f"{shape[1]} classes" if len(shape) == 2 else f"outputs of shape {shape}"
        raise WrongDataError(f"the network has {came}, the data has {classes}; allowed: the same number")


def measure(
    net: Any,
    data: Data,
    settings: Settings,
    *,
    curve: str,
    report: Report,
    judge: Callable[[nn.Module], float] | None = None,
) -> list[Row]:
    """The accuracy, or what else one judges by, at every size that the network has; it keeps the size it had."""

    def judge_of(net: nn.Module) -> Judged:
        if judge is not None:
            return Judged(judge(net), None)
        return judged(net, data, batch_size=settings.batch_size, workers=settings.workers)

    before: Any = net.plan()
    rows = []
    wanted = _offered(net, settings.sizes)
    tracker = Tracker(report, "measuring", total=len(wanted), unit="sizes")
    for i, (size, plan) in enumerate(wanted):
        tracker.update(i, f"now {size:.4g}")
        found = judge_of(_at(net, plan))
        rows.append(Row.of(size, plan, found.accuracy, curve, found.perplexity))
    if not isinstance(net, DecomposedNet):
        net.resize_(before)
    return rows


def _at(net: DecomposedNet | HasOwnSizes, plan: Any) -> nn.Module:
    """Return the network at one of its sizes; of a decomposed one a copy, which does not warn at every size."""
    if isinstance(net, DecomposedNet):
        return net.extract(plan)
    net.resize_(plan)
    return cast(nn.Module, net)


def _offered(net: DecomposedNet | HasOwnSizes, sizes: Iterable[float]) -> list[tuple[float, Any]]:
    """Return these sizes of a decomposed network, as far as it can be so small; of any other all that it has."""
    if not isinstance(net, DecomposedNet):
        return net.offered()
    selector = net.selector
    return [(size, net.plan(**{selector.measure: size})) for size in sizes if size >= selector.smallest_size]  # type: ignore[arg-type]


def smallest_within(rows: Sequence[Row], drop: float) -> Row | None:
    """The smallest measured size that loses at most `drop` points against the largest one measured."""
    measured = sorted((row for row in rows if row.accuracy is not None), key=lambda row: row.size)
    if not measured:
        return None
    least = (measured[-1].accuracy or 0.0) - drop - 1e-9  # rounding is no loss
    return next(row for row in measured if (row.accuracy or 0.0) >= least)
