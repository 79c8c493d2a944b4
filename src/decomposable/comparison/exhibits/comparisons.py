"""Figure 3, tables 1 and 2 and section 4.4 of the paper: against other methods; and what goes beyond it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from decomposable.comparison.exhibits.ablations import ACCURACY, MACS, against
from decomposable.comparison.exhibits.context import SIZES, Context, Points, Trained, at_size, label_of, series_of
from decomposable.comparison.exhibits.shown import Claim, Figure, Series, Shown, Table, judged
from decomposable.comparison.explorer import explored
from decomposable.data.base import TrainBatches
from decomposable.methods import find
from decomposable.methods.base import Paced
from decomposable.methods.decomposing import short_name
from decomposable.methods.tucker.method import CURVES
from decomposable.network.decompose import decompose
from decomposable.network.decomposed import DecomposedNet
from decomposable.progress import Progress
from decomposable.training.loop import moved, parameter_groups

QUARTER = 0.25


def _figure(trained: Trained, series: Sequence[Series]) -> Figure:
    return Figure(title=trained.group.title, x=MACS, y=ACCURACY, series=list(series))


def figure_3a(context: Context) -> Shown:
    """Against TRP, spatial form."""
    figures, claims = [], []
    for group in context.scale.compared("plain", "trp", "decomposable"):
        trained = context.of(group)
        ours = trained.shown("decomposable")
        trp = {name: points for name, points in trained.curves("trp").items() if "sp" in name}
        base = trained.curves("plain")[short_name("base", "spatial", "energy")]
        series = [series_of(ours, "Decomposable-Net", "decomposable")]
        series += [series_of(points, name, "trp", is_dashed=True) for name, points in trp.items()]
        figures.append(_figure(trained, [*series, series_of(base, "normal learning, by energy", "plain")]))
        claims.append(
            against(
                f"One Decomposable-Net is better than TRP at almost all sizes ({group.title}).",
                ours,
                list(trp.values()),
            )
        )
    return Shown(figures=figures, claims=claims)


def figure_3b(context: Context) -> Shown:
    """Against decompositions that are fine-tuned: Tucker, channel and spatial form at VBMF ranks."""
    names = {"tucker": "Tucker-2", "channel": "channel form", "spatial": "spatial form"}
    figures, claims = [], []
    for group in context.scale.compared("plain", "tucker", "decomposable"):
        trained = context.of(group)
        ours, curves = trained.shown("decomposable"), trained.curves("tucker")
        series = [series_of(ours, "Decomposable-Net, not retrained", "decomposable")]
        styles = ("tucker", "width", "slimmable")
        for (form, curve), method in zip(CURVES.items(), styles, strict=True):
            if curve in curves:
                series.append(
                    series_of(curves[curve], f"{names[form]} at VBMF ranks, fine-tuned", method, is_dashed=True)
                )
        base = trained.shown("plain")[:1]
        series.append(series_of(base, "normal learning, full size", "plain"))
        figures.append(_figure(trained, series))
        tuned = {form: curves[curve][0] for form, curve in CURVES.items() if curve in curves}
        gaps = {names[form]: at_size(ours, p["macs_fraction"]) - p["accuracy"] for form, p in tuned.items()}
        claims.append(
            judged(
                f"Decomposable-Net is as good as what was fine-tuned for its one size, or better ({group.title}).",
                [gap >= -0.5 for gap in gaps.values() if np.isfinite(gap)],
                ", ".join(f"{name}: {gap:+.1f}" for name, gap in gaps.items() if np.isfinite(gap)),
            )
        )
        drops = [points[0]["accuracy"] - points[1]["accuracy"] for points in curves.values() if len(points) > 1]
        claims.append(
            judged(
                "A fine-tuned decomposition loses when its size is changed again.",
                [drop > 0 for drop in drops],
                "at the next smaller size: " + ", ".join(f"{-drop:+.1f}" for drop in drops),
            )
        )
    return Shown(figures=figures, claims=claims)


def figure_3c(context: Context) -> Shown:
    """Against slimmable networks, US-Nets and narrower networks trained alone."""
    figures, claims = [], []
    for group in context.scale.compared("slimmable", "us-net", "width", "decomposable"):
        trained = context.of(group)
        ours = trained.shown("decomposable")
        rivals = {name: trained.shown(name) for name in ("slimmable", "us-net", "width")}
        series = [series_of(ours, label_of("decomposable"), "decomposable")]
        series += [series_of(points, label_of(name), name, is_dashed=True) for name, points in rivals.items()]
        figures.append(_figure(trained, series))
        for name in ("slimmable", "us-net"):
            moderate = [point for point in rivals[name] if point["macs_fraction"] >= 0.2]
            text = f"Decomposable-Net is better than {label_of(name)}s down to about 0.2× ({group.title})."
            claims.append(against(text, ours, [moderate]))
        small = [point for point in rivals["us-net"] if point["macs_fraction"] < 0.15]
        gaps = [point["accuracy"] - at_size(ours, point["macs_fraction"]) for point in small]
        gaps = [gap for gap in gaps if np.isfinite(gap)]
        claims.append(
            judged(
                "Below that, cutting channels is better.",
                [gap > 0 for gap in gaps],
                "US-Net ahead by " + ", ".join(f"{gap:.1f}" for gap in gaps) if gaps else "no common size so small",
            )
        )
    return Shown(figures=figures, claims=claims)


def _nearest(points: Points, size: float) -> Any:
    """The point of a curve whose size is nearest, by its logarithm."""
    return min(points, key=lambda point: abs(np.log(point["macs_fraction"] / size))) if points else None


def table_1(context: Context) -> Shown:
    """Accuracy at about a quarter of the MACs."""
    tables, claims = [], []
    order = ("plain", "width", "scratch", "trp", "tucker", "slimmable", "us-net", "decomposable", "elastic")
    for group in context.scale.compared(*order):
        trained = context.of(group)
        found = {name: _nearest(trained.shown(name), QUARTER) for name in order if trained.shown(name)}
        full = trained.shown("plain")[0]
        rows = [["normal learning, full size", _with_range(full), "1.00"]]
        rows += [[label_of(name), _with_range(point), f"{point['macs_fraction']:.2f}"] for name, point in found.items()]
        tables.append(
            Table(
                title=group.title,
                columns=["method", "accuracy (%)", "MACs (×)"],
                rows=rows,
                note="Mean and range over the seeds; of a method with several curves the one that stands for it.",
            )
        )
        ours = found.get("decomposable")
        rivals = {name: p for name, p in found.items() if name in ("trp", "tucker", "slimmable", "us-net", "width")}
        if ours is not None:
            claims.append(
                judged(
                    f"At about 0.25× Decomposable-Net is the most accurate ({group.title}).",
                    [ours["accuracy"] > p["accuracy"] for p in rivals.values()],
                    ", ".join(f"{label_of(n)} {ours['accuracy'] - p['accuracy']:+.1f}" for n, p in rivals.items()),
                )
            )
    return Shown(tables=tables, claims=claims)


def _with_range(point: Any) -> str:
    half = (point["highest"] - point["lowest"]) / 2
    return f"{point['accuracy']:.2f}" + (f" ± {half:.2f}" if point["seeds"] > 1 else "")


PAPER_TABLE_1 = Table(
    title="The paper's, ResNet-50 on ImageNet",
    columns=["method", "accuracy (%)", "MACs (×)"],
    rows=[
        ["Baseline (1.0×)", "76.48 ± 0.09", "1.00"],
        ["Baseline (0.5×)", "72.37 ± 0.11", "0.26"],
        ["TRP (spatial)", "70.57 ± 0.22", "0.28"],
        ["Tucker", "67.36 ± 0.06", "0.30"],
        ["Slimmable network", "72.19 ± 0.12", "0.26"],
        ["US-Nets", "71.43 ± 0.12", "0.26"],
        ["Decomposable-Net (spatial)", "73.15 ± 0.06", "0.27"],
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
    order = ("plain", "width", "trp", "tucker", "slimmable", "us-net", "decomposable", "elastic")
    tables, claims = [], []
    for group in context.scale.compared(*order):
        trained = context.of(group)
        modules = {"plain": trained.model("plain")}
        found: dict[str, Any] = {"plain": trained.shown("plain")[0]}
        for name in order[1:]:
            if trained.shown(name):
                found[name] = _nearest(trained.shown(name), QUARTER)
                modules[name] = _module_at(trained, name, found[name]["macs_fraction"])
        context.report(Progress("timing", f"{len(modules)} networks in turn"))
        seconds = interleaved({name: module.eval() for name, module in modules.items()}, trained.example)
        base = seconds["plain"]
        rows = [
            [
                "normal learning, full size" if name == "plain" else label_of(name),
                f"{found[name]['accuracy']:.2f}",
                f"{found[name]['macs_fraction']:.2f}",
                f"{1e3 * each:.2f}",
                f"{base / each:.2f}",
            ]
            for name, each in seconds.items()
        ]
        tables.append(
            Table(
                title=group.title,
                columns=["method", "accuracy (%)", "MACs (×)", "time (ms)", "speed (×)"],
                rows=rows,
                note=f"PyTorch, one image, {torch.get_num_threads()} threads; medians of passes in turn.",
            )
        )
        if "us-net" in seconds and "decomposable" in seconds:
            claims.append(
                judged(
                    f"Decomposable-Net is faster than US-Nets at similar MACs ({group.title}).",
                    [seconds["decomposable"] < seconds["us-net"]],
                    ", ".join(f"{n} {1e3 * seconds[n]:.2f} ms" for n in ("decomposable", "us-net", "plain")),
                )
            )
    return Shown(tables=tables, claims=claims)


def _module_at(trained: Trained, method: str, size: float) -> nn.Module:
    net = trained.network(method, training=trained.trainings(method)[0])
    if isinstance(net, DecomposedNet):
        return net.extract(net.choose(macs=min(1.0, size * 1.0001)))
    nearest = min(net.sizes, key=lambda each: abs(np.log(each.macs_fraction / size)))
    net.set_plan_(nearest)
    module: nn.Module = net.extract()
    return module


@torch.inference_mode()
def interleaved(modules: dict[str, nn.Module], x: torch.Tensor, rounds: int = 60) -> dict[str, float]:
    """The median seconds of a pass of each, called in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    for number in range(rounds + 5):
        for name, module in modules.items():
            start = time.perf_counter()
            module(x)
            if number >= 5:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def section_4_4(context: Context) -> Shown:
    """The same ranks trained from scratch, and the time of a training step of each method."""
    tables, claims = [], []
    for group in context.scale.compared("decomposable", "scratch", "elastic"):
        trained = context.of(group)
        scratch, ours = trained.shown("scratch"), trained.shown("decomposable")
        point = _nearest(scratch, QUARTER)
        here = {"decomposable": at_size(ours, point["macs_fraction"]), "scratch": point["accuracy"]}
        if trained.shown("elastic"):
            here["elastic"] = at_size(trained.shown("elastic"), point["macs_fraction"])
        rows = [[label_of(name), f"{value:.2f}", f"{point['macs_fraction']:.2f}"] for name, value in here.items()]
        tables.append(
            Table(title=f"The same ranks: {group.title}", columns=["method", "accuracy (%)", "MACs (×)"], rows=rows)
        )
        claims.append(
            judged(
                f"The performance at 0.25× is not reached by training the same ranks from scratch ({group.title}).",
                [here["decomposable"] > here["scratch"]] if np.isfinite(here["decomposable"]) else [],
                f"{here['decomposable']:.2f} and {here['scratch']:.2f}%",
            )
        )
    trained = context.of(context.scale.compared("decomposable")[0])
    seconds = step_seconds(trained, ("plain", "trp", "slimmable", "us-net", "decomposable", "elastic"), context)
    plain = seconds["plain"]
    rows = [[label_of(name), f"{1e3 * each:.0f}", f"{each / plain:.2f}"] for name, each in seconds.items()]
    tables.append(
        Table(
            title=f"One training step of each method, in turn: {trained.group.title}",
            columns=["method", "time (ms)", "plain steps"],
            rows=rows,
            note="The paper: 6.9 days for Decomposable-Net, 5.7 for TRP and 6.9 for US-Nets (ResNet-50, ImageNet).",
        )
    )
    claims.append(
        judged(
            "Training costs are comparable to those of TRP and US-Nets.",
            [seconds["decomposable"] <= 1.3 * seconds[name] for name in ("trp", "us-net")],
            ", ".join(f"{label_of(n)} {seconds[n] / plain:.2f}" for n in ("decomposable", "trp", "us-net", "elastic"))
            + " plain steps",
        )
    )
    return Shown(tables=tables, claims=claims)


def step_seconds(trained: Trained, names: Sequence[str], context: Context, rounds: int = 12) -> dict[str, float]:
    """The mean seconds of a training step of each method, in turn: a step of `elastic` may be one of several kinds."""
    settings = trained.settings
    batches = TrainBatches(trained.data, batch_size=settings.batch_size, epochs=1, seed=0)
    steps: dict[str, Callable[[Any, float], None]] = {}
    for name in names:
        steps[name] = _stepper(trained, name)
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


def _stepper(trained: Trained, name: str) -> Callable[[Any, float], None]:
    settings = trained.settings
    torch.manual_seed(0)
    model = trained.task.build_model()
    if settings.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    method = find(name)
    network = method.network(model, trained.example, settings, is_trained=False).train()
    step = method.step(network, settings)
    optimizer = torch.optim.SGD(parameter_groups(network, settings.weight_decay), lr=0.01, momentum=settings.momentum)

    def once(batch: Any, done: float) -> None:
        optimizer.zero_grad()
        if isinstance(step, Paced):
            step.at(done)
        x, y = moved(batch, torch.device("cpu"), settings)
        step.backward(lambda net: trained.task.loss(net, (x, y)))
        optimizer.step()

    return once


def beyond(context: Context) -> Shown:
    """What none of the paper's methods reaches: elastic training, a cut by data, and tuned vectors."""
    figures, claims = [], []
    rivals = ("plain", "trp", "slimmable", "us-net", "decomposable")
    for group in context.scale.compared(*rivals, "width", "scratch", "elastic"):
        trained = context.of(group)
        ours = trained.shown("elastic")
        series = [series_of(ours, "elastic training", "elastic")]
        series.append(_tuned(trained))
        series.append(_cut(trained))
        series += [
            series_of(trained.shown(name), label_of(name), name, is_dashed=True)
            for name in rivals
            if trained.shown(name)
        ]
        series += [
            series_of(trained.shown(name), label_of(name), name) for name in ("width", "scratch") if trained.shown(name)
        ]
        figures.append(_figure(trained, series))
        claims += _beyond_claims(trained, ours, rivals)
    first = context.of(context.scale.compared("elastic")[0])
    title = f"{first.group.title}, elastic training"
    network = explored(first.network("elastic").selector, first.shown("elastic"), title)
    return Shown(figures=figures, claims=claims, explorer=network)


def _tuned(trained: Trained) -> Series:
    """`tune_` on the elastic network."""
    net = trained.network("elastic")
    sizes = [size for size in SIZES[1:] if size >= net.selector.smallest_size]
    trained.report(Progress("tuning", "scales and shifts for each size"))
    net.tune_(trained.calibration, sizes=sizes, progress=lambda line: None)
    accuracies = []
    for size in sizes:
        net.calibrate_(trained.calibration, sizes=[size], progress=lambda line: None)
        net.set_plan_(net.choose(macs=size))
        accuracies.append(trained.accuracy(net))
    return Series(name="elastic training, then tune_", x=sizes, y=accuracies, method="elastic", is_dashed=True)


def _cut(trained: Trained) -> Series:
    """The plainly trained network, cut by data without training."""
    trained.report(Progress("cutting", "the plainly trained network by data"))
    model = trained.model("plain")
    net = decompose(model, trained.example, data=trained.calibration, progress=lambda line: None)
    sizes = [size for size in SIZES if size >= net.selector.smallest_size]
    values = [trained.calibrated_accuracy(net.extract(net.choose(macs=size)), f"cut to {size:g}×") for size in sizes]
    return Series(name="normal learning, cut by data (no training)", x=sizes, y=values, method="plain", is_dashed=True)


def _beyond_claims(trained: Trained, ours: Points, rivals: Sequence[str]) -> list[Claim]:
    claims = []
    for name in rivals:
        points = [p for p in trained.shown(name) if 0.1 <= p["macs_fraction"] <= 1.001]
        if points:
            claims.append(
                against(
                    f"Elastic training is above {label_of(name)} from 0.1× to 1× ({trained.group.title}).",
                    ours,
                    [points],
                )
            )
    for name in ("scratch", "width"):
        point = _nearest(trained.shown(name), QUARTER)
        if point is not None:
            gap = at_size(ours, point["macs_fraction"]) - point["accuracy"]
            claims.append(
                judged(
                    f"At about 0.25× it is not below {label_of(name)} ({trained.group.title}).",
                    [gap >= 0] if np.isfinite(gap) else [],
                    f"{gap:+.2f} at {point['macs_fraction']:.2f}×" if np.isfinite(gap) else "no size to compare",
                )
            )
    return claims
