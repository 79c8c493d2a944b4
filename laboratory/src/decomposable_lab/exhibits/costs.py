"""Table 2 and section 4.4 of the paper: what a cut network takes to run, and what a training takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from decomposable.data.base import TrainBatches
from decomposable.network.decomposed import DecomposedNet
from decomposable.progress import Progress
from decomposable_lab.comparison.stepping import Stepper
from decomposable_lab.exhibits.comparisons import QUARTER, at_a_quarter, nearest
from decomposable_lab.exhibits.context import (
    Context,
    Points,
    Trained,
    at_size,
    label_of,
)
from decomposable_lab.exhibits.shown import Axis, Claim, Shown, Table, dots, judged, seen_on
from decomposable_lab.exhibits.verdicts import better, compared, range_of, tally

Times = tuple[float, float, float]
"""The lower quartile, the median and the upper quartile of seconds."""

STEPS_OF = {"plain": "normal learning"}
"""What a step is called of a method whose label is about what comes afterwards."""

PAPER_4_4 = Table(
    title="The paper's, ResNet-50 on ImageNet",
    columns=["method", "accuracy (%)", "MACs (×)", "training (days, 8 GPUs)"],
    rows=[
        ["Decomposable-Net", "73.15 ± 0.06", "0.27", "6.9"],
        ["the same ranks from scratch", "71.55 ± 0.17", "0.27", "–"],
        ["TRP", "–", "–", "5.7"],
        ["US-Nets", "–", "–", "6.9"],
    ],
)


PAPER_TABLE_2 = Table(
    title="The paper's, ResNet-34 on CIFAR-100, Core i7-8700K",
    columns=["method", "accuracy (%)", "time (ms)", "speed (×)"],
    rows=[
        ["Baseline", "77.49", "4.57", "1.00"],
        ["TRP (spatial)", "76.65", "2.67", "1.71"],
        ["Tucker", "76.28", "1.96", "2.33"],
        ["US-Nets", "77.24", "3.27", "1.40"],
        ["Decomposable-Net (spatial)", "77.15", "2.02", "2.26"],
    ],
)


TABLE_2 = ("width", "trp", "tucker", "slimmable", "us-net", "decomposable", "elastic")


def table_2(context: Context) -> Shown:
    """Measure inference time per image on this CPU, at about a quarter of the MACs, all methods in turn."""
    group = context.scale.timed("plain", *TABLE_2)
    trained = context.of(group)
    found = at_a_quarter(trained, TABLE_2)
    which = {label: (point["curve"], point["macs_fraction"]) for label, (_, point) in found.items()}
    times = trained.kept("times", group.methods, partial(_times, trained, found), about=which)
    seconds: dict[str, Times] = {label: times["seconds"][label] for label in found}
    rows = {
        f"{label} ({found[label][1]['macs_fraction']:.2f}×)": (1e3 * middle, 1e3 * low, 1e3 * high)
        for label, (low, middle, high) in seconds.items()
    }
    title = f"Time of one image at about a quarter of the MACs: {group.title}"
    return Shown(
        figures=[dots(title, Axis(label="time (ms), median and quartiles"), rows, spread="from quartile to quartile")],
        tables=[_table_of_times(group.title, found, seconds, times["threads"])],
        claims=seen_on(group.title, _of_times(found, seconds)),
    )


def _times(trained: Trained, found: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """The quartiles of the seconds of one image, for each network of a table, all of them in one memory layout."""
    layout = torch.channels_last if trained.settings.channels_last else torch.contiguous_format
    full, *others = found
    modules = {full: trained.task.build_model()}
    modules |= {label: _module_at(trained, *found[label]) for label in others}
    ready = {label: each.cpu().to(memory_format=layout).eval() for label, each in modules.items()}  # type: ignore[call-overload]
    x = trained.example.cpu()
    x = x.contiguous(memory_format=layout) if x.dim() == 4 else x
    trained.report(Progress("timing", f"{len(ready)} networks in turn"))
    return {"seconds": interleaved(ready, x), "threads": torch.get_num_threads()}


def _table_of_times(
    title: str, found: Mapping[str, tuple[str, Any]], seconds: Mapping[str, Times], threads: int
) -> Table:
    base = next(iter(seconds.values()))[1]
    rows = [
        [
            label,
            f"{found[label][1]['accuracy']:.2f}",
            f"{found[label][1]['macs_fraction']:.2f}",
            f"{1e3 * middle:.2f} ({1e3 * low:.2f} to {1e3 * high:.2f})",
            f"{base / middle:.2f}",
        ]
        for label, (low, middle, high) in seconds.items()
    ]
    return Table(
        title=title,
        columns=["method", "accuracy (%)", "MACs (×)", "time (ms)", "speed (×)"],
        rows=rows,
        note=f"PyTorch, one image, {threads} threads, one memory layout for all; medians (and quartiles) of passes in "
        "turn. Networks of fewer channels may have fresh weights: their time does not depend on them. The same ranks "
        "from scratch are Decomposable-Net's layers, and take as long.",
    )


def _of_times(found: Mapping[str, tuple[str, Any]], seconds: Mapping[str, Times]) -> list[Claim]:
    """Return the paper's three statements; ranges of times are from quartile to quartile."""
    labels: dict[str, str] = {}
    for label, (name, _) in found.items():
        labels.setdefault(name, label)  # the first of the forms that are fine-tuned is Tucker-2
    if not {"us-net", "tucker", "decomposable"} <= set(labels):
        return []
    quick = {name: (-seconds[label][2], -seconds[label][0]) for name, label in labels.items()}
    middle = {name: f"{1e3 * seconds[label][1]:.2f}" for name, label in labels.items()}
    (_, ours), (_, universal) = found[labels["decomposable"]], found[labels["us-net"]]
    return [
        judged(
            "Decomposable-Net is faster than US-Nets at similar MACs.",
            [compared(quick["decomposable"], quick["us-net"]) == "ahead"],
            f"{middle['decomposable']} and {middle['us-net']} ms",
        ),
        judged(
            "Decomposable-Net is as fast as Tucker decomposition, or faster …",
            [compared(quick["decomposable"], quick["tucker"]) != "behind"],
            f"{middle['decomposable']} ms at {ours['macs_fraction']:.2f}× and {middle['tucker']} ms at "
            f"{found[labels['tucker']][1]['macs_fraction']:.2f}×",
        ),
        judged(
            "… with an accuracy comparable to that of US-Nets.",
            [compared(range_of(ours), range_of(universal)) != "behind"],
            f"{ours['accuracy']:.2f} and {universal['accuracy']:.2f}%",
        ),
    ]


def _module_at(trained: Trained, method: str, point: Any) -> nn.Module:
    """Return the network of a point, as plain layers."""
    size = point["macs_fraction"]
    net = trained.network_of_point(method, point)
    if isinstance(net, DecomposedNet):
        return net.extract(net.plan(macs=min(1.0, size * 1.0001)))
    nearest = min(net.sizes, key=lambda each: abs(np.log(each.macs_fraction / size)))
    net.resize_(nearest)
    module: nn.Module = net.extract()
    return module


@torch.inference_mode()
def interleaved(modules: Mapping[str, nn.Module], x: torch.Tensor, rounds: int = 60) -> dict[str, Times]:
    """Return the seconds of a pass of each, called in turn: the lower quartile, the median and the upper quartile."""
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    for number in range(rounds + 5):
        for name, module in modules.items():
            start = time.perf_counter()
            module(x)
            if number >= 5:
                seconds[name].append(time.perf_counter() - start)
    quartiles = {name: statistics.quantiles(each, n=4) for name, each in seconds.items()}
    return {name: (low, middle, high) for name, (low, middle, high) in quartiles.items()}


def section_4_4(context: Context) -> Shown:
    """Return the same ranks trained from scratch, and the time of a training step of each method."""
    tables, claims = [], []
    for group in context.scale.compared("decomposable", "scratch", "elastic"):
        trained = context.of(group)
        scratch, ours = trained.shown("scratch"), trained.shown("decomposable")
        point = nearest(scratch, QUARTER)
        size = point["macs_fraction"]
        curves = {"decomposable": ours, "scratch": [point], "elastic": trained.shown("elastic")}
        rows = [[label_of(name), _interval(points, size), f"{size:.2f}"] for name, points in curves.items() if points]
        tables.append(
            Table(
                title=f"The same ranks: {group.title}",
                columns=["method", "accuracy (%)", "MACs (×)"],
                rows=rows,
                note="Mean, and the lowest and highest over the seeds where there are several.",
            )
        )
        text = "The performance at 0.25× is not reached by training the same ranks from scratch."
        claims += seen_on(group.title, [better(text, tally(ours, [[point]]))])
    trained = context.of(context.scale.compared("decomposable")[0])
    names = ("plain", "trp", "slimmable", "us-net", "decomposable", "elastic")
    seconds = trained.kept("step-seconds", ["decomposable"], partial(step_seconds, trained, names))
    plain, ours = seconds["plain"], seconds["decomposable"]
    rows = [[STEPS_OF.get(n, label_of(n)), f"{1e3 * each:.0f}", f"{each / plain:.2f}"] for n, each in seconds.items()]
    tables.append(
        Table(
            title=f"One training step of each method, in turn: {trained.group.title}",
            columns=["method", "time (ms)", "of a step of normal learning"],
            rows=rows,
        )
    )
    parts = {STEPS_OF.get(name, label_of(name)): (each / ours,) * 3 for name, each in seconds.items()}
    printed = {label_of("trp"): 5.7 / 6.9, label_of("us-net"): 1.0, label_of("decomposable"): 1.0}
    figure = dots(
        f"What training takes, as a part of Decomposable-Net's: {trained.group.title}",
        Axis(label="time of a training step, Decomposable-Net's is 1"),
        parts,
        printed,
        "The paper's are whole trainings of a ResNet-50 on ImageNet: 6.9, 5.7 and 6.9 days.",
    )
    cost = judged(
        "Training costs are comparable to those of TRP and US-Nets.",
        [seconds["decomposable"] <= 1.3 * seconds[name] for name in ("trp", "us-net")],
        ", ".join(f"{label_of(n)} {seconds[n] / plain:.2f}" for n in ("decomposable", "trp", "us-net", "elastic"))
        + " times a step of normal learning",
    )
    claims += seen_on(trained.group.title, [cost])
    return Shown(figures=[figure], tables=tables, claims=claims)


def _interval(points: Points, size: float) -> str:
    mean, low, high = (at_size(points, size, key) for key in ("accuracy", "lowest", "highest"))
    return f"{mean:.2f}" + (f" ({low:.2f} to {high:.2f})" if high > low else "")


def step_seconds(trained: Trained, names: Sequence[str], rounds: int = 12) -> dict[str, float]:
    """Measure the mean seconds of a training step of each method: a step of `elastic` may be one of several kinds."""
    settings = trained.settings
    batches = TrainBatches(trained.data, batch_size=settings.batch_size, epochs=1, seed=0)
    steps = {
        name: Stepper(trained.task, replace(settings, method=name), trained.example, trained.device) for name in names
    }
    trained.report(Progress("timing", f"steps of {len(steps)} methods in turn"))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        batch = batches[number % len(batches)]
        for name, step in steps.items():
            start = time.perf_counter()
            step(batch, number / (rounds + 1))
            if number:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.fmean(each) for name, each in seconds.items()}
