"""What goes beyond the paper: elastic training, cuts by data and tuned sizes, beside its methods."""

from __future__ import annotations

from collections.abc import Sequence

from decomposable.comparison.exhibits.comparisons import QUARTER, curve_figure, nearest
from decomposable.comparison.exhibits.context import (
    SIZES,
    Context,
    Points,
    Trained,
    label_of,
    series_of,
)
from decomposable.comparison.exhibits.shown import Claim, Series, Shown, judged, seen_on
from decomposable.comparison.exhibits.verdicts import better, not_worse, tally
from decomposable.comparison.explorer import explored
from decomposable.network.decompose import decompose
from decomposable.progress import Progress

BEST_OF = (
    "Bands are the range over the seeds. Normal learning is, at each size, the best of eight ways to cut it, and TRP "
    "the best of its trainings, chosen by the test images, which is in their favour."
)

SAID = {
    "plain": "normal learning",
    "trp": "TRP",
    "slimmable": "slimmable networks",
    "us-net": "US-Nets",
    "decomposable": "Decomposable-Net",
    "scratch": "the same ranks, trained from scratch",
    "width": "a narrower network, trained alone",
}
"""What a sentence calls a method."""


def beyond(context: Context) -> Shown:
    """What none of the paper's methods reaches: elastic training, a cut by data, and tuned vectors."""
    figures, claims = [], []
    rivals = ("plain", "trp", "slimmable", "us-net", "decomposable")
    for group in context.scale.compared(*rivals, "width", "scratch", "elastic"):
        trained = context.of(group)
        ours = trained.shown("elastic")
        series = [series_of(ours, "elastic training", "elastic")]
        series.append(_tuned(trained, context.scale.tuning_steps))
        series.append(_cut(trained))
        series += [
            series_of(trained.shown(name), label_of(name), name, is_dashed=True)
            for name in rivals
            if trained.shown(name)
        ]
        series += [
            series_of(trained.shown(name), label_of(name), name) for name in ("width", "scratch") if trained.shown(name)
        ]
        figures.append(curve_figure(trained, series, BEST_OF))
        claims += seen_on(group.title, _beyond_claims(trained, ours, rivals))
    first = context.of(context.scale.compared("elastic")[0])
    title = f"{first.group.title}, elastic training"
    network = explored(first.network("elastic").selector, first.shown("elastic"), title)
    return Shown(figures=figures, claims=claims, explorer=network)


def _tuned(trained: Trained, steps: int) -> Series:
    """`tune_` on the elastic network."""
    net = trained.network("elastic")
    sizes = [size for size in SIZES[1:] if size >= net.selector.smallest_size]
    trained.report(Progress("tuning", "scales and shifts for each size"))
    net.tune_(trained.calibration, sizes=sizes, steps=steps, progress=lambda line: None)
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
    """What this project asks of its own training, and of the paper's."""
    claims = []
    for name in rivals:
        text = f"From 0.1× to 1×, elastic training is above {SAID[name]}."
        claims.append(better(text, tally(ours, [trained.shown(name)], (0.1, 1.0))))
    for name in ("scratch", "width"):
        point = nearest(trained.shown(name), QUARTER)
        if point is not None:
            text = f"Near 0.25×, elastic training is not below {SAID[name]}."
            claims.append(not_worse(text, tally(ours, [[point]])))
    joint = trained.shown("decomposable")
    for name in ("plain", "trp", "slimmable", "us-net"):
        text = f"From 0.2× to 0.75×, Decomposable-Net is above {SAID[name]}."
        claims.append(better(text, tally(joint, [trained.shown(name)], (0.2, 0.75))))
    full = joint[0]["accuracy"] - trained.shown("plain")[0]["accuracy"]
    claims.append(
        judged(
            "Decomposable-Net's full size is within half a point of normal learning's.",
            [full >= -0.5],
            f"{full:+.2f} points",
        )
    )
    return claims
