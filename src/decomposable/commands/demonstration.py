"""The demonstration: one small network trained in three ways, then cut to the same sizes.

    digits ──▶ the same initial network ──┬─ elastic training ─┐
                                          ├─ joint training ───┼──▶ decompose ──▶ calibrate_ ──▶ resize_ ──▶ accuracy
                                          └─ plain training ───┘

All see the same batches in the same order, for the same number of steps. `train` and `accuracy_at_sizes` are the whole
use of the library; the rest of this file runs them for all three, and `demo.py` shows what came out.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import decomposable as dn
from decomposable.data import digits
from decomposable.progress import Progress, Report, Tracker, quiet, within
from decomposable.training.records import versions
from decomposable_edge.checks import check_count
from decomposable_edge.errors import InvalidArgumentError

METHODS = ("elastic", "joint", "plain")
TABLE_SIZES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1)
CURVE_SIZES = tuple(round(0.1 * 10 ** (i / 20), 4) for i in range(20))
"""More sizes, for the figure only: from 0.1 to 1 in equal steps of a logarithmic axis."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run. The method's own settings are the paper's for CIFAR-100; the task is one that takes a minute.

    Few images and five convolutions make the digits hard enough to tell the trainings apart. With more images, or
    fewer layers, all networks stay accurate down to smaller sizes, and the gap begins there.
    """

    seed: int = 0
    runs: int = 2  # with seeds seed, seed + 1, …; the results are their mean
    train_images: int = 300
    widths: tuple[int, ...] = (32, 64, 64, 64, 64)
    epochs: int = 40
    batch_size: int = 50
    learning_rate: float = 0.1
    weight_decay: float = 5e-4
    form: str = "spatial"
    ratio: tuple[float, float] = (0.01, 0.5)
    balance: float = 0.5
    curve_sizes: tuple[float, ...] = CURVE_SIZES

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**31:
            raise InvalidArgumentError(f"seed={self.seed}; allowed: an int from 0 to {2**31 - 1}")
        check_count("runs", self.runs)
        check_count("epochs", self.epochs)
        if not 1 <= self.batch_size <= self.train_images:
            raise InvalidArgumentError(f"batch_size={self.batch_size}; allowed: an int from 1 to {self.train_images}")

    @property
    def steps(self) -> int:
        """Updates of the weights in one training."""
        return self.epochs * (self.train_images // self.batch_size)


def train(
    model: nn.Module, data: TensorDataset, settings: Settings, *, seed: int, method: str, report: Report
) -> dn.DecomposedNet:
    """Train in an ordinary loop, and return the network of all sizes; the three ways differ in the objective."""
    generator = torch.Generator().manual_seed(seed)  # of the order of the images
    loader = DataLoader(data, settings.batch_size, shuffle=True, drop_last=True, generator=generator)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.learning_rate, momentum=0.9, nesterov=True, weight_decay=settings.weight_decay
    )
    example, objective = data.tensors[0][:1], objective_of(model, data.tensors[0][:1], settings, method, seed)
    schedule = schedule_of(optimizer, objective, settings)
    model.train()
    tracker = Tracker(report, "training", total=settings.epochs, unit="epochs")
    for epoch in range(settings.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = add_gradient(model, objective, x, y)
            optimizer.step()
            schedule.step()
        tracker.update(epoch + 1, f"loss {loss:.3f}")
    if isinstance(objective, dn.Elastic):
        return objective.decompose()
    return dn.decompose(model, example_input=example, form=settings.form)


def objective_of(
    model: nn.Module, example: Tensor, settings: Settings, method: str, seed: int
) -> dn.Elastic | dn.JointObjective | None:
    """Return what is minimised: elastically, or the paper's joint objective; None for the plain loss."""
    if method == "plain":
        return None
    if method == "joint":
        return dn.JointObjective(model, form=settings.form, ratio=settings.ratio, balance=settings.balance, seed=seed)
    return dn.Elastic(
        model, example_input=example, steps=settings.steps, from_scratch=True, form=settings.form, seed=seed
    )


def schedule_of(
    optimizer: torch.optim.Optimizer, objective: object, settings: Settings
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the learning rate's: elastic training has its own, which falls with its low-rank steps."""
    if isinstance(objective, dn.Elastic):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, objective.learning_rate)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=settings.steps)


def add_gradient(model: nn.Module, objective: dn.Elastic | dn.JointObjective | None, x: Tensor, y: Tensor) -> float:
    """Add the gradient of one batch to the parameters' `.grad`, and return the loss of the network that ran."""
    if objective is not None:
        return objective.backward(forward=lambda net: net(x), loss=lambda out: F.cross_entropy(out, y)).loss.item()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()


def accuracy_at_sizes(net: dn.DecomposedNet, data: digits.Digits, sizes: Sequence[float]) -> list[dict[str, Any]]:
    """Calibrate once on the training images, then take every size; no retraining anywhere."""
    net.calibrate_(DataLoader(data.train, batch_size=100))
    rows = []
    for size in sizes:
        plan = net.resize_(macs=size)
        rows.append({"size": size, "macs": plan.macs, "params": plan.params, "accuracy": accuracy(net, data.test)})
    return rows


@torch.no_grad()
def accuracy(net: nn.Module, data: TensorDataset) -> float:
    """Return the percentage of images that are classified correctly."""
    hits = sum(int((net(x).argmax(dim=1) == y).sum()) for x, y in DataLoader(data, batch_size=250))
    return 100 * hits / len(data)


def run(settings: Settings, report: Report = quiet) -> dict[str, Any]:
    """Train and measure all networks for every seed, and return all that came out, ready for JSON."""
    start = time.perf_counter()
    sizes = sorted({*TABLE_SIZES, *settings.curve_sizes}, reverse=True)
    names = [f"run {i + 1}/{settings.runs}" for i in range(settings.runs)]
    runs = [run_once(settings, settings.seed + i, sizes, name, report) for i, name in enumerate(names)]
    return {
        "settings": asdict(settings),
        "steps": settings.steps,
        "test_images": digits.IMAGES - settings.train_images,
        "table": [mean_row(runs, size) for size in TABLE_SIZES],
        "curve": [mean_row(runs, size) for size in sizes],
        "runs": runs,
        "seconds": round(time.perf_counter() - start, 1),
        "threads": torch.get_num_threads(),
        "versions": versions("torch", "numpy", "scikit-learn", "matplotlib"),
    }


def run_once(settings: Settings, seed: int, sizes: Sequence[float], name: str, report: Report) -> dict[str, Any]:
    """Run all methods from the same initial weights, on the same split of the images."""
    data = digits.load(train_images=settings.train_images, seed=seed)
    torch.manual_seed(seed)
    initial = dn.models.small_cnn(settings.widths)
    outcome: dict[str, Any] = {"seed": seed}
    for method in METHODS:
        start = time.perf_counter()
        task, model = f"{name}, {method}", copy.deepcopy(initial)
        net = train(model, data.train, settings, seed=seed, method=method, report=within(task, report))
        seconds = time.perf_counter() - start
        report(Progress(task, f"calibrating and measuring {len(sizes)} sizes"))
        rows = accuracy_at_sizes(net, data, sizes)
        outcome[method] = {"training_seconds": round(seconds, 2), "rows": rows}
    return outcome


def mean_row(runs: Sequence[dict[str, Any]], size: float) -> dict[str, Any]:
    """Return all methods at one size, averaged over the runs."""
    row: dict[str, Any] = {"size": size}
    for method in METHODS:
        rows = [next(row for row in run[method]["rows"] if row["size"] == size) for run in runs]
        row[method] = {key: sum(r[key] for r in rows) / len(rows) for key in ("macs", "params", "accuracy")}
    return row
