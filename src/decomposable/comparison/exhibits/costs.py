"""Table 2 and section 4.4 of the paper: what a cut network takes to run, and what a training takes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from decomposable.comparison.exhibits.comparisons import QUARTER, at_a_quarter, nearest
from decomposable.comparison.exhibits.context import (
    Context,
    Points,
    Trained,
    at_size,
    label_of,
)
from decomposable.comparison.exhibits.shown import Claim, Shown, Table, judged, seen_on
from decomposable.comparison.exhibits.verdicts import better, tally
from decomposable.comparison.stepping import Stepper
from decomposable.data.base import TrainBatches
from decomposable.network.decomposed import DecomposedNet
from decomposable.progress import Progress

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


def table_2(context: Context) -> Shown:
    """Inference time per image on this CPU, at about a quarter of the MACs, all methods in turn."""
    order = ("width", "trp", "tucker", "slimmable", "us-net", "decomposable", "elastic")
    tables, claims = [], []
    for group in context.scale.compared("plain", *order):
        trained = context.of(group)
        found = at_a_quarter(trained, order)
        full, *others = found
        modules = {full: trained.task.build_model()}
        modules |= {label: _module_at(trained, *found[label]) for label in others}
        context.report(Progress("timing", f"{len(modules)} networks in turn"))
        seconds = interleaved({name: module.eval() for name, module in modules.items()}, trained.example)
        base = seconds[full][1]
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
        tables.append(
            Table(
                title=group.title,
                columns=["method", "accuracy (%)", "MACs (×)", "time (ms)", "speed (×)"],
                rows=rows,
                note=f"PyTorch, one image, {torch.get_num_threads()} threads; medians (and quartiles) of passes in "
                f"turn, with {os.getloadavg()[0]:.1f} processes at work on the machine on average. Networks of fewer "
                "channels have weights drawn at random: their time does not depend on them.",
            )
        )
        times = {found[label][0]: each for label, each in seconds.items()}
        claims += seen_on(group.title, _of_times(times))
    return Shown(tables=tables, claims=claims)


def _of_times(times: Mapping[str, tuple[float, float, float]]) -> list[Claim]:
    """The paper's two statements; of the forms of Tucker's, the last one counts, which is the spatial one."""
    claims = []
    for rival, text in (
        ("us-net", "faster than US-Nets at similar MACs"),
        ("tucker", "as fast as what is decomposed and fine-tuned"),
    ):
        if rival in times and "decomposable" in times:
            (low, ours, _), (_, theirs, high) = times["decomposable"], times[rival]
            is_so = ours < theirs if rival == "us-net" else low <= high
            claims.append(
                judged(f"Decomposable-Net is {text}.", [is_so], f"{1e3 * ours:.2f} and {1e3 * theirs:.2f} ms")
            )
    return claims


def _module_at(trained: Trained, method: str, point: Any) -> nn.Module:
    """The network of a point, as plain layers."""
    size = point["macs_fraction"]
    net = trained.network_of_curve(method, point["curve"])
    if isinstance(net, DecomposedNet):
        return net.extract(net.choose(macs=min(1.0, size * 1.0001)))
    nearest = min(net.sizes, key=lambda each: abs(np.log(each.macs_fraction / size)))
    net.set_plan_(nearest)
    module: nn.Module = net.extract()
    return module


@torch.inference_mode()
def interleaved(
    modules: Mapping[str, nn.Module], x: torch.Tensor, rounds: int = 60
) -> dict[str, tuple[float, float, float]]:
    """The seconds of a pass of each, called in turn: the lower quartile, the median and the upper quartile."""
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
    """The same ranks trained from scratch, and the time of a training step of each method."""
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
    seconds = step_seconds(trained, ("plain", "trp", "slimmable", "us-net", "decomposable", "elastic"), context)
    plain = seconds["plain"]
    rows = [[label_of(name), f"{1e3 * each:.0f}", f"{each / plain:.2f}"] for name, each in seconds.items()]
    tables.append(
        Table(
            title=f"One training step of each method, in turn: {trained.group.title}",
            columns=["method", "time (ms)", "plain steps"],
            rows=rows,
        )
    )
    cost = judged(
        "Training costs are comparable to those of TRP and US-Nets.",
        [seconds["decomposable"] <= 1.3 * seconds[name] for name in ("trp", "us-net")],
        ", ".join(f"{label_of(n)} {seconds[n] / plain:.2f}" for n in ("decomposable", "trp", "us-net", "elastic"))
        + " plain steps",
    )
    claims += seen_on(trained.group.title, [cost])
    return Shown(tables=tables, claims=claims)


def _interval(points: Points, size: float) -> str:
    mean, low, high = (at_size(points, size, key) for key in ("accuracy", "lowest", "highest"))
    return f"{mean:.2f}" + (f" ({low:.2f} to {high:.2f})" if high > low else "")


def step_seconds(trained: Trained, names: Sequence[str], context: Context, rounds: int = 12) -> dict[str, float]:
    """The mean seconds of a training step of each method, in turn: a step of `elastic` may be one of several kinds."""
    settings, cpu = trained.settings, torch.device("cpu")
    batches = TrainBatches(trained.data, batch_size=settings.batch_size, epochs=1, seed=0)
    steps = {name: Stepper(trained.task, replace(settings, method=name), trained.example, cpu) for name in names}
    context.report(Progress("timing", f"steps of {len(steps)} methods in turn"))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        batch = batches[number % len(batches)]
        for name, step in steps.items():
            start = time.perf_counter()
            step(batch, number / (rounds + 1))
            if number:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.fmean(each) for name, each in seconds.items()}
