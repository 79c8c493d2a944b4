"""Figure 3 and table 1 of the paper: against other methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np

from decomposable.training.finishing import calibration_data_for
from decomposable.training.methods.flat import with_overrides
from decomposable_lab.exhibits.context import (
    Context,
    Points,
    Trained,
    at_size,
    label_of,
    series_of,
    trp_label,
)
from decomposable_lab.exhibits.shown import (
    ACCURACY,
    MACS,
    Axis,
    Claim,
    Figure,
    Series,
    Shown,
    Table,
    dots,
    judged,
    seen_on,
)
from decomposable_lab.exhibits.verdicts import (
    ALMOST_ALL,
    better,
    by_budget,
    chance,
    distinct,
    not_worse,
    range_of,
    tally,
    the_best,
    told_apart,
)
from decomposable_lab.methods.ours import short_name
from decomposable_lab.methods.tucker.method import CURVES
from decomposable_lab.methods.tucker.method import METHOD as TUCKER

QUARTER = 0.25
FLAT_TO = 0.5

Drops = tuple[float, float]
"""What two curves lose between the same two sizes: theirs, and ours."""


FORM_NAMES = {"tucker": "Tucker-2", "channel": "channel form", "spatial": "spatial form"}


def curve_figure(trained: Trained, series: Sequence[Series], note: str = "") -> Figure:
    """Show accuracy over MACs on one network and data set."""
    return Figure(title=trained.group.title, x=MACS, y=ACCURACY, series=list(series), note=note)


def figure_3a(context: Context) -> Shown:
    """Compare with TRP, spatial form."""
    figures, claims = [], []
    for group in context.scale.compared("plain", "trp", "decomposable"):
        trained = context.of(group)
        ours = trained.shown("decomposable")
        trp = {name: points for name, points in trained.curves("trp").items() if "sp" in name}
        base = trained.curves("plain")[short_name("base", "spatial", "energy")]
        series = [series_of(ours, "Decomposable-Net", "decomposable")]
        series += [series_of(points, trp_label(name), "trp", is_dashed=True) for name, points in trp.items()]
        figures.append(curve_figure(trained, [*series, series_of(base, "normal learning, by energy", "plain")]))
        claims += seen_on(group.title, _claims_of_3a(ours, {trp_label(name): points for name, points in trp.items()}))
    return Shown(figures=figures, claims=claims)


def _claims_of_3a(ours: Points, trp: Mapping[str, Points]) -> list[Claim]:
    """A training of TRP has a size of its own: the smallest that is as good as its full size, without a break."""
    own = {name: _down_to(points) for name, points in trp.items()}
    below = {name: _below(points, own[name]["macs_fraction"]) for name, points in trp.items()}
    drops = {name: _drops([own[name], *points], ours) for name, points in below.items() if points}
    return [
        better(
            "One Decomposable-Net is better than TRP at almost all sizes.",
            tally(ours, map(distinct, trp.values())),
            ALMOST_ALL,
        ),
        judged(
            "TRP's curve is flat (from full size to a half, at least): its larger sizes are no better than its own.",
            [point["macs_fraction"] <= FLAT_TO for point in own.values()],
            ", ".join(f"{name}: equal from 1× to {point['macs_fraction']:.2f}×" for name, point in own.items()),
        ),
        judged(
            "Below its own size TRP loses more than Decomposable-Net does.",
            [theirs > mine + chance(points[0]["accuracy"]) for (theirs, mine), points in _with(drops, below)],
            "to the next smaller size, and Decomposable-Net between the same two: "
            + ", ".join(f"{name} {-theirs:+.1f} and {-mine:+.1f}" for name, (theirs, mine) in drops.items()),
        ),
    ]


def _below(points: Points, size: float) -> list[Mapping[str, Any]]:
    return [point for point in points if point["macs_fraction"] < size]


def _with(drops: Mapping[str, Drops], points: Mapping[str, Points]) -> list[tuple[Drops, Points]]:
    """Return what each loses, where ours has both sizes, and the points that it is about."""
    return [(each, points[name]) for name, each in drops.items() if np.isfinite(each[1])]


def _down_to(points: Points) -> Mapping[str, Any]:
    """Return the smallest point from which a curve is equal to its largest size, without a break."""
    ordered = sorted(points, key=lambda point: -point["macs_fraction"])
    equal = takewhile(lambda point: told_apart(point["accuracy"], ordered[0]["accuracy"]) == "equal", ordered)
    return list(equal)[-1]


def figure_3b(context: Context) -> Shown:
    """Compare with fine-tuned decompositions: Tucker, channel and spatial form at VBMF ranks."""
    figures, claims = [], []
    for group in context.scale.compared("plain", "tucker", "decomposable"):
        trained = context.of(group)
        ours, found = trained.shown("decomposable"), trained.curves("tucker")
        curves = {form: found[curve] for form, curve in CURVES.items() if curve in found}
        before = trained.kept("before-fine-tuning", ["plain"], partial(_before_tuning, trained, list(curves)))
        series = [series_of(ours, "Decomposable-Net, not retrained", "decomposable")]
        for form, points in curves.items():
            method = "tucker" if form == "tucker" else ""  # of no method: what colours are left
            series.append(series_of(points, f"{FORM_NAMES[form]} at VBMF ranks, fine-tuned", method, is_dashed=True))
            macs, accuracy = before[form]
            series.append(Series(name=f"{FORM_NAMES[form]}, before", x=[macs], y=[accuracy], is_points=True))
        series.append(series_of(trained.shown("plain")[:1], "normal learning, full size", "plain"))
        note = f"Lines go on to sizes that were cut again without fine-tuning. 'Before' is seed {trained.seed}."
        figures.append(curve_figure(trained, series, note))
        full = trained.shown("plain")[0]["accuracy"]
        claims += seen_on(group.title, _claims_of_3b(ours, curves, {form: before[form][1] for form in curves}, full))
    return Shown(figures=figures, claims=claims)


def _before_tuning(trained: Trained, forms: Sequence[str]) -> dict[str, tuple[float, float]]:
    """MACs and accuracy of the plainly trained network, decomposed at VBMF ranks and calibrated."""
    found = {}
    material = calibration_data_for(trained.data, trained.settings, trained.task.loss, lambda line: None)
    for form in forms:
        settings = with_overrides(trained.settings, {"vbmf_form": form, "sizes": (1.0,)})
        network = TUCKER.network(trained.model("plain"), trained.example, settings, is_trained=True)
        size = TUCKER.sized(network, material, settings).sizes[0]
        found[form] = size.macs_fraction, trained.calibrated_accuracy(network.eval(), f"{form} before fine-tuning")
    return found


def _claims_of_3b(ours: Points, curves: Mapping[str, Points], before: Mapping[str, float], full: float) -> list[Claim]:
    tuned = {form: points[0] for form, points in curves.items()}
    drops = {FORM_NAMES[form]: _drops(points, ours) for form, points in curves.items() if len(points) > 1}
    cut = {FORM_NAMES[form]: points[1:] for form, points in curves.items()}
    ahead = {form: p["accuracy"] - at_size(ours, p["macs_fraction"]) for form, p in tuned.items()}
    ahead = {form: gap for form, gap in ahead.items() if np.isfinite(gap)}
    return [
        judged(
            "The performance drops significantly after decomposition (by five points, or more) …",
            [full - accuracy >= 5 for accuracy in before.values()],
            f"from {full:.1f}% to "
            + ", ".join(f"{accuracy:.1f} ({FORM_NAMES[form]})" for form, accuracy in before.items()),
        ),
        judged(
            "… but can be recovered by retraining (half of it, or more).",
            [tuned[form]["accuracy"] - before[form] >= 0.5 * (full - before[form]) for form in tuned],
            "to " + ", ".join(f"{point['accuracy']:.1f} ({FORM_NAMES[form]})" for form, point in tuned.items()),
        ),
        judged(
            "Tucker decomposition is more efficient than the other two: the most above Decomposable-Net's curve, or "
            "the least below it.",
            [ahead["tucker"] >= max(ahead.values())] if "tucker" in ahead and len(ahead) > 1 else [],
            ", ".join(
                f"{FORM_NAMES[form]} {gap:+.1f} at {tuned[form]['macs_fraction']:.2f}×" for form, gap in ahead.items()
            ),
        ),
        not_worse(
            "Decomposable-Net is as good as what was fine-tuned for its one size, or better.",
            tally(ours, [[point] for point in tuned.values()]),
        ),
        judged(
            "What was fine-tuned for one size loses more when its size is changed again.",
            [theirs > mine + chance(points[0]["accuracy"]) for (theirs, mine), points in _with(drops, cut)],
            "to the next smaller size, and Decomposable-Net between the same two: "
            + ", ".join(f"{name} {-theirs:+.1f} and {-mine:+.1f}" for name, (theirs, mine) in drops.items())
            if drops
            else "the ranks that VBMF gives are so small that none of the three has a smaller size",
        ),
    ]


def _drops(points: Points, ours: Points) -> Drops:
    """Return what a curve loses from its largest size to the next one, and ours between the same two."""
    first, second = (at_size(ours, point["macs_fraction"]) for point in points[:2])
    return points[0]["accuracy"] - points[1]["accuracy"], first - second


def figure_3c(context: Context) -> Shown:
    """Compare with slimmable networks, US-Nets and narrower networks trained alone."""
    figures, claims = [], []
    for group in context.scale.compared("plain", "slimmable", "us-net", "width", "decomposable"):
        trained = context.of(group)
        ours = trained.shown("decomposable")
        rivals = {name: trained.shown(name) for name in ("slimmable", "us-net", "width")}
        series = [series_of(ours, label_of("decomposable"), "decomposable")]
        series += [series_of(points, label_of(name), name, is_dashed=True) for name, points in rivals.items()]
        series.append(series_of(trained.shown("plain")[:1], "normal learning, full size", "plain"))
        figures.append(curve_figure(trained, series))
        claims += seen_on(group.title, _claims_of_3c(ours, rivals, trained.shown("plain")[:1]))
    return Shown(figures=figures, claims=claims)


def _claims_of_3c(ours: Points, rivals: Mapping[str, Points], full: Points) -> list[Claim]:
    slimmable, universal, widths = rivals["slimmable"], rivals["us-net"], rivals["width"]
    smallest = _below(ours, 0.15)
    gap = ours[0]["accuracy"] - full[0]["accuracy"]
    return [
        better(
            "Decomposable-Net is better than slimmable networks down to about 0.2×.",
            tally(ours, [slimmable], (0.2, 1.0)),
        ),
        better("Decomposable-Net is better than US-Nets down to about 0.2×.", tally(ours, [universal], (0.2, 1.0))),
        better("It is better than narrower networks trained alone.", tally(ours, [widths])),
        better(
            "Narrower networks trained alone are better than slimmable networks and US-Nets.",
            tally(slimmable, [widths]).turned + tally(universal, [widths]).turned,
        ),
        judged(
            "Its full size is comparable to that of normal learning (within half a point, as the paper's is).",
            [gap >= -0.5],
            f"{gap:+.2f} points",
        ),
        better(
            "Its full size is better than those of slimmable networks and US-Nets.",
            tally(ours, [slimmable[:1], universal[:1]]),
        ),
        better(
            "Below about 0.15×, slimmable networks and US-Nets are better.",
            by_budget(slimmable, smallest) + by_budget(universal, smallest),
        ),
    ]


PAPER_3C = Table(
    title="The paper's, full size",
    columns=["training", "ResNet-50, ImageNet (%)", "ResNet-34, CIFAR-100 (%)"],
    rows=[
        ["normal learning", "76.48", "77.49"],
        ["Decomposable-Net", "76.01", "–"],
        ["US-Nets", "75.31", "–"],
        ["slimmable, losses summed", "–", "76.6"],
    ],
)


def nearest(points: Points, size: float) -> Any:
    """Return the point of a curve whose size is nearest, by its logarithm."""
    return min(points, key=lambda point: abs(np.log(point["macs_fraction"] / size))) if points else None


TABLE_1 = ("plain", "width", "scratch", "trp", "tucker", "slimmable", "us-net", "decomposable", "elastic")


def table_1(context: Context) -> Shown:
    """Show accuracy at about a quarter of the MACs."""
    figures, tables, claims = [], [], []
    for group in context.scale.compared(*TABLE_1):
        trained = context.of(group)
        found = at_a_quarter(trained, TABLE_1)
        rows = [[name, _with_deviation(point), f"{point['macs_fraction']:.2f}"] for name, (_, point) in found.items()]
        tables.append(
            Table(
                title=group.title,
                columns=["method", "accuracy (%)", "MACs (×)"],
                rows=rows,
                note="Mean and standard deviation over the seeds. Where a method has several trainings or ways to be "
                "cut, the best of them on the test images, which is in its favour.",
            )
        )
        rivals = {
            label: point
            for label, (name, point) in found.items()
            if name in ("trp", "tucker", "slimmable", "us-net", "width")
        }
        ours = next((point for name, point in found.values() if name == "decomposable"), None)
        figures.append(_dots_of_table_1(group.title, {label: point for label, (_, point) in found.items()}))
        if ours is not None:
            claim = the_best(
                "At about 0.25× Decomposable-Net is the most accurate.",
                range_of(ours),
                {label: range_of(point) for label, point in rivals.items()},
                ", ".join(f"{label} {ours['accuracy'] - p['accuracy']:+.1f}" for label, p in rivals.items()),
            )
            claims += seen_on(group.title, [claim])
    return Shown(figures=figures, tables=tables, claims=claims)


def _dots_of_table_1(title: str, points: Mapping[str, Any]) -> Figure:
    """The accuracies of a table and their ranges; the paper's own, of other networks, are in the table beside."""
    return dots(
        f"Accuracy at about a quarter of the MACs: {title}",
        Axis(label="test accuracy (%)"),
        {
            f"{label} ({point['macs_fraction']:.2f}×)": (point["accuracy"], *_ends(point))
            for label, point in points.items()
        },
    )


def _ends(point: Any) -> tuple[float, float]:
    return point["lowest"], point["highest"]


def at_a_quarter(trained: Trained, methods: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Return for each name in a table the method and its point nearest to a quarter of the MACs; first the original.

    What is fine-tuned has one size: those that it was cut to afterwards, without fine-tuning, are not it.
    """
    found = {}
    if full := trained.shown("plain")[:1]:
        found["normal learning, full size"] = ("plain", full[0])
    for name in methods:
        if name == "tucker":
            curves = trained.curves("tucker")
            tuned = {form: curves[curve][:1] for form, curve in CURVES.items() if curve in curves}
            each = {f"{FORM_NAMES[form]}, VBMF, fine-tuned": points for form, points in tuned.items()}
        else:
            each = {label_of(name): trained.shown(name)}
        found |= {label: (name, nearest(points, QUARTER)) for label, points in each.items() if points}
    return found


def _with_deviation(point: Any) -> str:
    return f"{point['accuracy']:.2f}" + (f" ± {point['deviation']:.2f}" if point["seeds"] > 1 else "")


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
