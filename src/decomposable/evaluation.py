"""Accuracy of a network, and of a decomposed network at many sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.data.base import Data, TestBatches
from decomposable.errors import DecomposableError
from decomposable.network import DecomposedNet
from decomposable.ranks import RankPlan


class WrongDataError(DecomposableError):
    """The network and the data do not go together."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A decomposed network at one size; `size` is what was asked for, the rest what it came to."""

    size: float
    macs: int | None
    params: int
    macs_fraction: float | None
    params_fraction: float
    ranks: tuple[int, int]  # the smallest and the largest
    accuracy: float | None  # percent; None where it was not measured

    @classmethod
    def of(cls, size: float, plan: RankPlan, accuracy: float | None) -> Row:
        """The row of a plan."""
        return cls(
            size=size,
            macs=plan.macs,
            params=plan.params,
            macs_fraction=plan.macs_fraction,
            params_fraction=plan.params_fraction,
            ranks=(min(plan.ranks.values()), max(plan.ranks.values())),
            accuracy=accuracy,
        )


@torch.no_grad()
def accuracy(net: nn.Module, data: Data, *, batch_size: int = 250, workers: int = 0) -> float:
    """Percent of the test images whose class has the highest output (top-1)."""
    was_training = net.training
    net.eval()
    parameter = next(net.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    right = 0
    for x, y in TestBatches(data, batch_size=batch_size).loader(workers=workers):
        outputs = net(x.to(device))
        check_outputs(outputs, data.classes)
        right += int((outputs.argmax(dim=1).cpu() == y).sum())
    net.train(was_training)
    return 100 * right / data.test_count


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
    net: DecomposedNet,
    data: Data,
    sizes: Iterable[float],
    *,
    batch_size: int = 250,
    workers: int = 0,
    report: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """The accuracy at every size, with no retraining; the network keeps the size it had."""
    before = net.plan
    rows = []
    wanted = list(sizes)
    for i, size in enumerate(wanted):
        report(f"measuring sizes: {size:g} ({i + 1} of {len(wanted)})")
        plan = net.set_plan_(net.selector.of_size(size))
        rows.append(Row.of(size, plan, accuracy(net, data, batch_size=batch_size, workers=workers)))
    net.set_plan_(before)
    return rows


def smallest_within(rows: Sequence[Row], drop: float) -> Row | None:
    """The smallest measured size that loses at most `drop` points against the largest one measured."""
    measured = sorted((row for row in rows if row.accuracy is not None), key=lambda row: row.size)
    if not measured:
        return None
    least = (measured[-1].accuracy or 0.0) - drop - 1e-9  # rounding is no loss
    return next(row for row in measured if (row.accuracy or 0.0) >= least)
