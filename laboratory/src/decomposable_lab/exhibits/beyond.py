"""What goes beyond the paper: elastic training, cuts by data and tuned sizes, beside its methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from decomposable.network.decompose import decompose
from decomposable.progress import Progress
from decomposable_lab.comparison.explorer import explored, readable
from decomposable_lab.exhibits.comparisons import QUARTER, curve_figure, nearest
from decomposable_lab.exhibits.context import SIZES, Context, Points, Trained, at_size, label_of, series_of
from decomposable_lab.exhibits.shown import MACS, Axis, Claim, Figure, Series, Shown, judged, seen_on
from decomposable_lab.exhibits.verdicts import better, not_worse, tally

BEST_OF = (
    "Bands are the range over the seeds, where there are several; what was tuned and cut is of one seed. Normal "
    "learning is, at each size, the best of eight ways to cut it by its weights, and TRP the best of its trainings, "
    "chosen by the test images, which is in their favour. Elastic training's rate falls only in its second half."
)
FAR_BELOW = 5.0
RIVALS = ("plain", "trp", "slimmable", "us-net", "decomposable")

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
    """Return what none of the paper's methods reaches: elastic training, a cut by data, and tuned vectors."""
    figures, claims, networks = [], [], []
    for group in context.scale.compared(*RIVALS, "width", "scratch", "elastic"):
        trained = context.of(group)
        ours = trained.shown("elastic")
        tuned = trained.kept("tuned", ["elastic"], partial(_tuned, trained, context.scale.tuning_steps))
        cut = trained.kept("cut-by-data", ["plain"], partial(_cut, trained))
        others = {name: trained.shown(name) for name in (*RIVALS, "width", "scratch") if trained.shown(name)}
        series = [
            series_of(ours, "elastic training", "elastic"),
            _series("elastic training, then tuned", "elastic", tuned),
            _series("normal learning, cut by data (no training)", "plain", cut),
            *(series_of(points, label_of(name), name, is_dashed=name in RIVALS) for name, points in others.items()),
        ]
        figures += [curve_figure(trained, series, BEST_OF), _difference(group.title, ours, series[2:])]
        claims += seen_on(group.title, _beyond_claims(trained, ours, tuned, cut))
        networks.append(trained.kept("explored", ["elastic"], partial(_explored, trained)))
    return Shown(figures=figures, claims=claims, explorers=networks)


def _series(name: str, method: str, points: Points) -> Series:
    x, y = ([point[key] for point in points] for key in ("macs_fraction", "accuracy"))
    return Series(name=name, x=x, y=y, method=method, is_dashed=True)


def _difference(title: str, ours: Points, others: Sequence[Series]) -> Figure:
    """Return the same as seen from elastic training: above 0 is who is better."""
    lines = []
    for each in others:
        gaps = [(x, y - at_size(ours, x)) for x, y in zip(each.x, each.y, strict=True)]
        near = [(x, gap) for x, gap in gaps if np.isfinite(gap) and gap >= -FAR_BELOW]
        if near:
            x, y = zip(*near, strict=True)
            lines.append(replace(each, x=x, y=y, low=(), high=()))
    return Figure(
        title=f"Better or worse than elastic training: {title}",
        x=MACS,
        y=Axis(label="points of accuracy above elastic training"),
        series=lines,
        note=f"Above 0 the other is better. What is more than {FAR_BELOW:g} points below is left out.",
    )


def _tuned(trained: Trained, steps: int) -> list[dict[str, float]]:
    """`tune_` on the elastic network: MACs and accuracy of its sizes."""
    net = trained.network("elastic")
    sizes = [size for size in SIZES[1:] if size >= net.selector.smallest_size]
    trained.report(Progress("tuning", "scales and shifts for each size"))
    net.tune_(trained.some, sizes=sizes, steps=steps, progress=lambda line: None)
    found = []
    for size in sizes:
        net.calibrate_(trained.some, sizes=[size], progress=lambda line: None)
        plan = net.resize_(macs=size)
        found.append({"macs_fraction": plan.macs_fraction, "accuracy": trained.accuracy(net)})
    return found


def _cut(trained: Trained) -> list[dict[str, float]]:
    """Return the plainly trained network, cut by data without training: MACs and accuracy of its sizes."""
    trained.report(Progress("cutting", "the plainly trained network by data"))
    net = decompose(trained.model("plain"), trained.example, data=trained.some, progress=lambda line: None)
    plans = [net.plan(macs=size) for size in SIZES if size >= net.selector.smallest_size]
    return [
        {
            "macs_fraction": plan.macs_fraction or 1.0,
            "accuracy": trained.calibrated_accuracy(net.extract(plan), f"cut to {plan.macs_fraction:.2f}×"),
        }
        for plan in plans
    ]


def _explored(trained: Trained) -> dict[str, Any]:
    """For the page's slider: the sizes of one elastic network, and what they reach."""
    net, rows = trained.network("elastic"), trained.record("elastic")["sizes"]
    labels = readable(trained.task.build_model(), net.selector.full_plan().ranks)
    return explored(net.selector, rows, f"{trained.group.title}, elastic training, seed {trained.seed}", labels)


def _beyond_claims(trained: Trained, ours: Points, tuned: Points, cut: Points) -> list[Claim]:
    """Return what this project asks of its own training and cuts, and of the paper's training."""
    claims = []
    for name in RIVALS:
        text = f"From 0.1× to 1×, elastic training is above {SAID[name]}."
        claims.append(better(text, tally(ours, [trained.shown(name)], (0.1, 1.0))))
    claims += _claims_of_one_seed(trained, ours, tuned, cut)
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


def _claims_of_one_seed(trained: Trained, ours: Points, tuned: Points, cut: Points) -> list[Claim]:
    """Return what a cut by data and tuning add, each on one network."""
    single, small = _as_single(cut), [point for point in _as_single(tuned) if point["macs_fraction"] < 0.36]
    record = _as_single(trained.record("elastic")["sizes"])
    return [
        better("From 0.1× to 1×, elastic training is above normal learning, cut by data.", tally(ours, [single])),
        better(
            "From 0.1× to 0.75×, normal learning cut by data is above the best of its cuts by weights.",
            tally(single, [trained.shown("plain")], (0.1, 0.75)),
        ),
        better("At 0.35× and below, tuning makes elastic training better.", tally(record, [small]).turned),
    ]


def _as_single(points: Points) -> list[dict[str, Any]]:
    """Points of one run: without a range."""
    return [{**p, "lowest": p["accuracy"], "highest": p["accuracy"], "seeds": 1} for p in points]
