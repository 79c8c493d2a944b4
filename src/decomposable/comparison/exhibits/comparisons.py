"""Figure 3 and table 1 of the paper: against other methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decomposable.comparison.exhibits.ablations import ACCURACY, MACS
from decomposable.comparison.exhibits.context import (
    Context,
    Points,
    Trained,
    at_size,
    label_of,
    series_of,
    trp_label,
)
from decomposable.comparison.exhibits.shown import Claim, Figure, Series, Shown, Table, judged, seen_on
from decomposable.comparison.exhibits.verdicts import ALMOST_ALL, FLAT, better, not_worse, range_at, tally
from decomposable.methods.decomposing import short_name
from decomposable.methods.tucker.method import CURVES

QUARTER = 0.25


FORM_NAMES = {"tucker": "Tucker-2", "channel": "channel form", "spatial": "spatial form"}


def curve_figure(trained: Trained, series: Sequence[Series], note: str = "") -> Figure:
    """Accuracy over MACs on one network and data set."""
    return Figure(title=trained.group.title, x=MACS, y=ACCURACY, series=list(series), note=note)


def figure_3a(context: Context) -> Shown:
    """Against TRP, spatial form."""
    figures, claims = [], []
    for group in context.scale.compared("plain", "trp", "decomposable"):
        trained = context.of(group)
        ours = trained.shown("decomposable")
        trp = {name: points for name, points in trained.curves("trp").items() if "sp" in name}
        base = trained.curves("plain")[short_name("base", "spatial", "energy")]
        series = [series_of(ours, "Decomposable-Net", "decomposable")]
        series += [series_of(points, trp_label(name), "trp", is_dashed=True) for name, points in trp.items()]
        figures.append(curve_figure(trained, [*series, series_of(base, "normal learning, by energy", "plain")]))
        flat = {name: _flat_down_to(points) for name, points in trp.items()}
        judgements = (
            better(
                "One Decomposable-Net is better than TRP at almost all sizes.", tally(ours, trp.values()), ALMOST_ALL
            ),
            judged(
                "TRP's larger sizes are no better than the one that its training fixes.",
                [size < 0.75 for size in flat.values()],
                ", ".join(f"{trp_label(name)}: equal from 1× to {size:.2f}×" for name, size in flat.items()),
            ),
        )
        claims += seen_on(group.title, judgements)
    return Shown(figures=figures, claims=claims)


def _flat_down_to(points: Points) -> float:
    """The smallest size from which a curve is equal to its largest size, without a break."""
    flat = 1.0
    for point in sorted(points, key=lambda point: -point["macs_fraction"]):
        if point["accuracy"] < points[0]["accuracy"] - FLAT:
            break
        flat = point["macs_fraction"]
    return flat


def figure_3b(context: Context) -> Shown:
    """Against decompositions that are fine-tuned: Tucker, channel and spatial form at VBMF ranks."""
    names = FORM_NAMES
    figures, claims = [], []
    for group in context.scale.compared("plain", "tucker", "decomposable"):
        trained = context.of(group)
        ours, curves = trained.shown("decomposable"), trained.curves("tucker")
        series = [series_of(ours, "Decomposable-Net, not retrained", "decomposable")]
        for form, curve in CURVES.items():
            if curve in curves:
                method = "tucker" if form == "tucker" else ""  # of no method: what colours are left
                name = f"{names[form]} at VBMF ranks, fine-tuned"
                series.append(series_of(curves[curve], name, method, is_dashed=True))
        base = trained.shown("plain")[:1]
        series.append(series_of(base, "normal learning, full size", "plain"))
        figures.append(curve_figure(trained, series))
        tuned = {form: curves[curve][0] for form, curve in CURVES.items() if curve in curves}
        gaps = {names[form]: at_size(ours, p["macs_fraction"]) - p["accuracy"] for form, p in tuned.items()}
        drops = {form: _drops(curves[curve], ours) for form, curve in CURVES.items() if len(curves.get(curve, ())) > 1}
        judgements = (
            judged(
                "Decomposable-Net is as good as what was fine-tuned for its one size, or better.",
                [gap >= -0.5 for gap in gaps.values() if np.isfinite(gap)],
                ", ".join(f"{name}: {gap:+.1f}" for name, gap in gaps.items() if np.isfinite(gap)),
            ),
            judged(
                "What was fine-tuned for one size loses more when its size is changed again.",
                [theirs > own + FLAT for theirs, own in drops.values() if np.isfinite(own)],
                "to the next smaller size, and Decomposable-Net between the same two: "
                + ", ".join(f"{names[form]} {-theirs:+.1f} and {-own:+.1f}" for form, (theirs, own) in drops.items())
                if drops
                else "the ranks that VBMF gives are so small that none of the three has a smaller size",
            ),
        )
        claims += seen_on(group.title, judgements)
    return Shown(figures=figures, claims=claims)


def _drops(points: Points, ours: Points) -> tuple[float, float]:
    """What a curve loses from its largest size to the next one, and ours between the same two."""
    first, second = (at_size(ours, point["macs_fraction"]) for point in points[:2])
    return points[0]["accuracy"] - points[1]["accuracy"], first - second


def figure_3c(context: Context) -> Shown:
    """Against slimmable networks, US-Nets and narrower networks trained alone."""
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
    small = tally(universal, [[point for point in ours if point["macs_fraction"] < 0.15]])
    return [
        better(
            "Decomposable-Net is better than slimmable networks down to about 0.2×.",
            tally(ours, [slimmable], (0.2, 1.0)),
        ),
        better("Decomposable-Net is better than US-Nets down to about 0.2×.", tally(ours, [universal], (0.2, 1.0))),
        better("It is better than narrower networks trained alone.", tally(ours, [widths])),
        better(
            "Narrower networks trained alone are better than slimmable networks and US-Nets.",
            tally(widths, [slimmable, universal], (0.5, 1.0)),
        ),
        not_worse("Its full size is as good as that of normal learning.", tally(ours, [full])),
        better("Below about 0.15×, US-Nets are better.", small),
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
    """The point of a curve whose size is nearest, by its logarithm."""
    return min(points, key=lambda point: abs(np.log(point["macs_fraction"] / size))) if points else None


TABLE_1 = ("plain", "width", "scratch", "trp", "tucker", "slimmable", "us-net", "decomposable", "elastic")


def table_1(context: Context) -> Shown:
    """Accuracy at about a quarter of the MACs."""
    tables, claims = [], []
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
        ours = [point for name, point in found.values() if name == "decomposable"]
        rivals = {
            label: point
            for label, (name, point) in found.items()
            if name in ("trp", "tucker", "slimmable", "us-net", "width")
        }
        if ours:
            claim = judged(
                "At about 0.25× Decomposable-Net is the most accurate.",
                [range_at(ours, ours[0]["macs_fraction"])[0] > _highest(point) for point in rivals.values()],
                ", ".join(f"{label} {ours[0]['accuracy'] - p['accuracy']:+.1f}" for label, p in rivals.items()),
            )
            claims += seen_on(group.title, [claim])
    return Shown(tables=tables, claims=claims)


def at_a_quarter(trained: Trained, methods: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """By what a table calls it, the method and its point nearest to a quarter of the MACs; first the original."""
    found = {}
    if full := trained.shown("plain")[:1]:
        found["normal learning, full size"] = ("plain", full[0])
    for name in methods:
        if name == "tucker":
            curves = trained.curves("tucker")
            each = {f"{FORM_NAMES[form]}, VBMF, fine-tuned": curves.get(curve, ()) for form, curve in CURVES.items()}
        else:
            each = {label_of(name): trained.shown(name)}
        found |= {label: (name, nearest(points, QUARTER)) for label, points in each.items() if points}
    return found


def _highest(point: Any) -> float:
    return range_at([point], point["macs_fraction"])[1]


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
