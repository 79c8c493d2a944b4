"""From the records of a comparison to curves: accuracy over size, mean and spread over the seeds.

A method may have several curves: ways to decompose one network, or trainings with other settings. The curve that stands
for it in the figure is, where all of them have the same sizes, the best of them at each size, which favours a method
that tries many; elsewhere it is the one that reaches the highest accuracy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from decomposable import methods
from decomposable.comparison.parts import Comparison, Part
from decomposable.machine import timestamp
from decomposable.training.runs import RunError

Rows = list[dict[str, Any]]
_NUMBERS = ("size", "macs", "params", "macs_fraction", "params_fraction", "accuracy")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size of a curve: means over the seeds, and the range of the accuracy."""

    size: float
    macs: float
    params: float
    macs_fraction: float
    params_fraction: float
    accuracy: float
    lowest: float
    highest: float
    seeds: int
    curve: str  # which one it is of, where the best of several was taken


def summary(comparison: Comparison) -> dict[str, Any]:
    """All methods' curves; what is not trained yet is left out."""
    content: dict[str, Any] = {
        "recipe": comparison.recipe,
        "seeds": list(comparison.seeds),
        "sizes": list(comparison.settings.sizes),
        "made": timestamp(),
        "methods": {},
    }
    for name in comparison.methods:
        by_curve: dict[str, list[Rows]] = defaultdict(list)
        for seed in comparison.seeds:
            parts = [part for part in comparison.parts if (part.method, part.seed) == (name, seed) and part.is_done]
            for curve, rows in _curves_of(parts).items():
                by_curve[curve].append(rows)
        curves = {curve: mean_over_seeds(runs, curve) for curve, runs in by_curve.items()}
        if curves:
            label, main = representative(curves)
            content["methods"][name] = {
                "summary": methods.find(name).summary,
                "shown": {"label": label, "points": [asdict(point) for point in main]},
                "curves": {curve: [asdict(point) for point in points] for curve, points in curves.items()},
            }
    return content


def _curves_of(parts: Sequence[Part]) -> dict[str, Rows]:
    """The rows of one method and seed by their curve; of alternatives those of the best training."""
    found: dict[str, dict[str, Rows]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        for row in (part.folder.finished() or {})["sizes"]:
            if not isinstance(row, dict) or not all(isinstance(row.get(key), int | float) for key in _NUMBERS):
                raise RunError(
                    f"{part.folder.record}: a size of it is {row!r:.80}", f"remove {part.path} to train it again"
                )
            found[row.get("curve") or part.training.curve][part.training.choice].append(row)
    return {curve: max(choices.values(), key=_best_at_its_largest) for curve, choices in found.items()}


def _best_at_its_largest(rows: Rows) -> float:
    return float(max(rows, key=lambda row: row["macs"])["accuracy"])


def mean_over_seeds(runs: Sequence[Rows], curve: str) -> list[Point]:
    """The points of a curve, largest first. Where the sizes of two seeds differ, as where the ranks are found from the
    weights, the largest of one goes with the largest of the other, and so on.
    """
    ordered = [sorted(rows, key=lambda row: -row["macs"]) for rows in runs]
    asked = [{row["size"] for row in rows} for rows in ordered]
    if any(sizes != asked[0] for sizes in asked) and (shared := set.intersection(*asked)):
        ordered = [[row for row in rows if row["size"] in shared] for rows in ordered]
    return [_point(rows, curve) for rows in zip(*ordered, strict=False)]


def _point(rows: Iterable[Mapping[str, Any]], curve: str) -> Point:
    rows = list(rows)
    accuracies = [row["accuracy"] for row in rows]
    means = {key: fmean(row[key] for row in rows) for key in _NUMBERS if key != "accuracy"}
    return Point(
        **means,
        accuracy=fmean(accuracies),
        lowest=min(accuracies),
        highest=max(accuracies),
        seeds=len(rows),
        curve=curve,
    )


def representative(curves: Mapping[str, Sequence[Point]]) -> tuple[str, list[Point]]:
    """The curve that stands for a method, and what to call it."""
    all_curves = list(curves.values())
    sizes = [tuple(point.size for point in points) for points in all_curves]
    if len(all_curves) > 1 and len(set(sizes)) == 1:
        best = [max(points, key=lambda point: point.accuracy) for points in zip(*all_curves, strict=True)]
        return f"best of {len(all_curves)}", best
    name, points = max(curves.items(), key=lambda item: max(point.accuracy for point in item[1]))
    return name, list(points)
