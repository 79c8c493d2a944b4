"""The demonstration: one small network trained twice, jointly and plainly, then cut to the same sizes.

    digits ──▶ the same initial network ──┬─ joint training ──▶ decompose ──▶ calibrate_ ──▶ resize_ ──▶ accuracy
                                          └─ plain training ──▶ decompose ──▶ calibrate_ ──▶ resize_ ──▶ accuracy

Both see the same batches in the same order, for the same number of steps. `train` and `accuracy_at_sizes` are the whole
use of the library; the rest of this file is data, table, figure and record.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import decomposable as dn
from decomposable.comparison.curve import Curve, draw_curves
from decomposable.data import digits
from decomposable.errors import InvalidArgumentError, MissingExtraError
from decomposable.files import write_atomically
from decomposable.progress import Progress, Report, Tracker, quiet, within
from decomposable.training.records import versions

METHODS = ("joint", "plain")
TABLE_SIZES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1)
CURVE_SIZES = tuple(round(0.1 * 10 ** (i / 20), 4) for i in range(20))
"""More sizes, for the figure only: from 0.1 to 1 in equal steps of a logarithmic axis."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run. The method's own settings are the paper's for CIFAR-100; the task is one that takes a minute.

    Few images and five convolutions make the digits hard enough to tell the two trainings apart. With more images, or
    fewer layers, both networks stay accurate down to smaller sizes, and the gap begins there.
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
        for name in ("runs", "epochs"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}; allowed: an int of at least 1")
        if not 1 <= self.batch_size <= self.train_images:
            raise InvalidArgumentError(f"batch_size={self.batch_size}; allowed: an int from 1 to {self.train_images}")

    @property
    def steps(self) -> int:
        """Updates of the weights in one training."""
        return self.epochs * (self.train_images // self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One network at one size."""

    size: float
    macs: int
    params: int
    accuracy: float


def train(
    model: nn.Module, data: TensorDataset, settings: Settings, *, seed: int, jointly: bool, report: Report
) -> nn.Module:
    """An ordinary training loop; joint training differs from plain training in one line of `add_gradient`."""
    generator = torch.Generator().manual_seed(seed)  # of the order of the images
    loader = DataLoader(data, settings.batch_size, shuffle=True, drop_last=True, generator=generator)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings.learning_rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=settings.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=settings.steps)
    joint = None
    if jointly:
        joint = dn.JointObjective(model, form=settings.form, ratio=settings.ratio, balance=settings.balance, seed=seed)
    model.train()
    tracker = Tracker(report, "training", total=settings.epochs, unit="epochs")
    for epoch in range(settings.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = add_gradient(model, joint, x, y)
            optimizer.step()
            schedule.step()
        tracker.update(epoch + 1, f"loss {loss:.3f}")
    return model.eval()


def add_gradient(model: nn.Module, joint: dn.JointObjective | None, x: Tensor, y: Tensor) -> float:
    """Add the gradient of one batch to the parameters' `.grad`; the loss of the full network comes back."""
    if joint is not None:
        return joint.backward(lambda net: F.cross_entropy(net(x), y)).full.item()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()


def accuracy_at_sizes(model: nn.Module, data: digits.Digits, settings: Settings, sizes: Sequence[float]) -> list[Row]:
    """Decompose once, calibrate once on the training images, then take every size; no retraining anywhere."""
    net = dn.decompose(model, example_input=data.train[:1], form=settings.form)
    net.calibrate_(DataLoader(data.train, batch_size=100))
    rows = []
    for size in sizes:
        plan = net.resize_(macs=size)
        assert plan.macs is not None
        rows.append(Row(size=size, macs=plan.macs, params=plan.params, accuracy=accuracy(net, data.test)))
    return rows


@torch.no_grad()
def accuracy(net: nn.Module, data: TensorDataset) -> float:
    """Percent of the images that are classified correctly."""
    hits = sum(int((net(x).argmax(dim=1) == y).sum()) for x, y in DataLoader(data, batch_size=250))
    return 100 * hits / len(data)


def run(settings: Settings, report: Report = quiet) -> dict[str, Any]:
    """Train and measure both networks for every seed; everything that came out, ready for JSON."""
    start = time.perf_counter()
    sizes = sorted({*TABLE_SIZES, *settings.curve_sizes}, reverse=True)
    runs = []
    for i in range(settings.runs):
        name = f"run {i + 1}/{settings.runs}"
        runs.append(run_once(settings, settings.seed + i, sizes, name, report))
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
    """Both methods from the same initial weights, on the same split of the images."""
    data = digits.load(train_images=settings.train_images, seed=seed)
    torch.manual_seed(seed)
    initial = dn.models.small_cnn(settings.widths)
    outcome: dict[str, Any] = {"seed": seed}
    for method in METHODS:
        start = time.perf_counter()
        model = train(
            copy.deepcopy(initial),
            data.train,
            settings,
            seed=seed,
            jointly=method == "joint",
            report=within(f"{name}, {method}", report),
        )
        seconds = time.perf_counter() - start
        report(Progress(f"{name}, {method}", f"calibrating and measuring {len(sizes)} sizes"))
        rows = accuracy_at_sizes(model, data, settings, sizes)
        outcome[method] = {"training_seconds": round(seconds, 2), "rows": [asdict(row) for row in rows]}
    return outcome


def mean_row(runs: Sequence[dict[str, Any]], size: float) -> dict[str, Any]:
    """Both methods at one size, averaged over the runs."""
    row: dict[str, Any] = {"size": size}
    for method in METHODS:
        rows = [next(row for row in run[method]["rows"] if row["size"] == size) for run in runs]
        row[method] = {key: sum(r[key] for r in rows) / len(rows) for key in ("macs", "params", "accuracy")}
    return row


def as_text(record: dict[str, Any]) -> str:
    """What was run, and the table."""
    settings, table = record["settings"], record["table"]
    seconds = {m: sum(run[m]["training_seconds"] for run in record["runs"]) for m in METHODS}
    runs = len(record["runs"])
    seeds = ", ".join(str(run["seed"]) for run in record["runs"])
    lines = [
        f"A CNN with {len(settings['widths'])} convolutions, trained on {settings['train_images']} images of "
        f"handwritten digits, tested on {record['test_images']:,} others.",
        f"Trained jointly and plainly: the same initial weights, batches and {record['steps']} steps "
        f"({seconds['joint']:.0f} s and {seconds['plain']:.0f} s).",
        "Then cut to each size by SVD and calibrated on the training images, without retraining.",
        f"Mean of {runs} runs (seeds {seeds}, each with its own split)." if runs > 1 else f"One run (seed {seeds}).",
        "",
        "part of        MACs       parameters       test accuracy",
        "the MACs  (at most)     joint    plain    joint    plain   difference",
    ]
    full_macs = table[0]["joint"]["macs"]
    for row in table:
        joint, plain = row["joint"], row["plain"]
        lines.append(
            f"{row['size']:8.2f}  {int(row['size'] * full_macs):9,}   {joint['params']:7,.0f}  {plain['params']:7,.0f}"
            f"   {joint['accuracy']:5.1f}%   {plain['accuracy']:5.1f}%   {joint['accuracy'] - plain['accuracy']:+10.1f}"
        )
    return "\n".join(lines)


def draw(record: dict[str, Any]) -> bytes:
    """The accuracy of both networks over their size, as a PNG: the mean as a line, the range of the runs as a band."""
    return draw_curves(
        [_curve(record, method) for method in METHODS],
        title="Train once, run at any size",
        message="Cut by SVD and not retrained, the jointly trained network stays accurate at small sizes.",
        caption=_caption(record),
        ticks=TABLE_SIZES,
    )


def _curve(record: dict[str, Any], method: str) -> Curve:
    runs = [[row["accuracy"] for row in run[method]["rows"]] for run in record["runs"]]
    at_size = list(zip(*runs, strict=True))
    return Curve(
        label=f"trained {method}ly",
        sizes=[row["size"] for row in record["curve"]],
        accuracies=[row[method]["accuracy"] for row in record["curve"]],
        lowest=list(map(min, at_size)),
        highest=list(map(max, at_size)),
    )


def _caption(record: dict[str, Any]) -> str:
    runs = len(record["runs"])
    return "a CNN on handwritten digits,\n" + (f"mean and range of {runs} runs" if runs > 1 else "one run")


def save(record: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write `curve.png` and `record.json` into the folder; where they went."""
    figure, data = folder / "curve.png", folder / "record.json"
    write_atomically(figure, draw(record))
    write_atomically(data, (json.dumps(record, indent=1) + "\n").encode())
    return figure, data


def require_extra() -> None:
    """Say at once, and not after training, what is missing."""
    for module, package in (("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")):
        if find_spec(module) is None:
            raise MissingExtraError.of(package, "demo")
