"""From the records in the folder of a comparison, of earlier commands too, to curves: accuracy over size, mean and
spread over the seeds.

A method may have several curves: ways to decompose one network, or trainings with other settings. The curve that stands
for it in the figure is, where all of them have the same sizes, the best of them at each size, which favours a method
that tries many; elsewhere it is the one that reaches the highest accuracy.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any

from decomposable.training import methods
from decomposable.training.runs import RunError
from decomposable_edge.errors import DecomposableError
from decomposable_edge.files import write_atomically
from decomposable_edge.machine import timestamp
from decomposable_lab.comparison.parts import Circumstances, Comparison, TrainingJob, finished, plan
from decomposable_lab.comparison.watching import Failures

Rows = list[dict[str, Any]]
_NUMBERS = ("size", "macs", "params", "macs_fraction", "params_fraction", "accuracy")


@dataclass(frozen=True, kw_only=True)
class Point:
    """Hold one size of a curve: means over the seeds, and the range of the accuracy."""

    size: float
    macs: float
    params: float
    macs_fraction: float
    params_fraction: float
    accuracy: float
    lowest: float
    highest: float
    deviation: float  # the standard deviation of the accuracy over the seeds, 0 of one
    seeds: int
    curve: str  # which one it is of, where the best of several was taken
    perplexity: tuple[float, float, float] | None = None  # of a text: the mean, the lowest and the highest


def gather(comparison: Comparison, circumstances: Circumstances, failures: Failures) -> dict[str, Any]:
    """Write the record of every method and seed that is complete, and the summary of all that is in the folder."""
    everything = _all_in_folder(comparison, circumstances)
    for name in everything.methods:
        for seed in everything.seeds:
            parts = [part for part in everything.parts if (part.method, part.seed) == (name, seed)]
            if parts and parts[0].training.folder and all(part.is_done for part in parts):
                _write_record(comparison, parts)
    content = {**_summary(everything), "failed": failures}
    write_atomically(comparison.out / "comparison.json", (json.dumps(content, indent=1) + "\n").encode())
    return content


def _all_in_folder(comparison: Comparison, circumstances: Circumstances) -> Comparison:
    """With the methods and seeds of earlier commands, as far as their settings are the same."""
    folders = [folder for name in methods.METHODS for folder in (comparison.out / name).glob("*")]
    seeds = sorted({*comparison.seeds, *(int(folder.name) for folder in folders if folder.name.isdigit())})
    every = plan(comparison.recipe, comparison.settings, list(methods.METHODS), seeds, comparison.out)
    asked = {part.path for part in comparison.parts}
    kept = [part for part in every.parts if part.path in asked or _belongs(part, circumstances)]
    names = {part.method for part in kept if part.is_done}
    return replace(
        every,
        parts=tuple(kept),
        methods=tuple(name for name in methods.METHODS if name in names),
        seeds=tuple(seed for seed in seeds if any(part.seed == seed and part.is_done for part in kept)),
    )


def _belongs(part: TrainingJob, circumstances: Circumstances) -> bool:
    """Return whether a part that nobody asked for is done under these settings."""
    try:
        return part.can_be_read and bool(finished(part, circumstances))
    except (DecomposableError, OSError):
        return False


def _write_record(comparison: Comparison, parts: Sequence[TrainingJob]) -> None:
    """One record for the trainings of one method and seed."""
    found = {part.training.folder: part.folder.finished(needs_network=False) or {} for part in parts}
    first = next(iter(found.values()))
    record = {
        "recipe": comparison.recipe,
        "method": parts[0].method,
        "seed": parts[0].seed,
        "finished": max(record["finished"] for record in found.values()),
        "training_seconds": round(sum(record["training_seconds"] for record in found.values()), 1),
        "machine": first["machine"],
        "commit": first["commit"],
        "trainings": {
            folder: {key: record[key] for key in ("settings", "training_seconds", "steps", "finished", "commit")}
            for folder, record in found.items()
        },
        "sizes": [{**row, "training": folder} for folder, record in found.items() for row in record["sizes"]],
    }
    path = comparison.out / parts[0].method / str(parts[0].seed) / "record.json"
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())


def _summary(comparison: Comparison) -> dict[str, Any]:
    """Return all methods' curves; what is not trained yet is left out."""
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


def _curves_of(parts: Sequence[TrainingJob]) -> dict[str, Rows]:
    """Return the rows of one method and seed by their curve; of alternatives those of the best training."""
    found: dict[str, dict[str, Rows]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        for row in (part.folder.finished(needs_network=False) or {})["sizes"]:
            if not isinstance(row, dict) or not all(isinstance(row.get(key), int | float) for key in _NUMBERS):
                raise RunError(
                    f"{part.folder.record}: a size of it is {row!r:.80}", f"remove {part.path} to train it again"
                )
            found[row.get("curve") or part.training.curve][part.training.choice].append(row)

    def accuracy_at_the_largest(rows: Rows) -> float:
        return float(max(rows, key=lambda row: row["macs"])["accuracy"])

    return {curve: max(choices.values(), key=accuracy_at_the_largest) for curve, choices in found.items()}


def mean_over_seeds(runs: Sequence[Rows], curve: str) -> list[Point]:
    """Return the points of a curve, largest first. If the sizes of two seeds differ, as when ranks are found from the
    weights, the largest of one goes with the largest of the other, and so on.
    """
    ordered = [sorted(rows, key=lambda row: -row["macs"]) for rows in runs]
    asked = [{row["size"] for row in rows} for rows in ordered]
    if any(sizes != asked[0] for sizes in asked) and (shared := set.intersection(*asked)):
        ordered = [[row for row in rows if row["size"] in shared] for rows in ordered]
    return [_point(rows, curve) for rows in zip(*ordered, strict=False)]


def _point(rows: Sequence[Mapping[str, Any]], curve: str) -> Point:
    means = {key: fmean(row[key] for row in rows) for key in _NUMBERS}
    accuracies = [row["accuracy"] for row in rows]
    of_texts = [row["perplexity"] for row in rows if row.get("perplexity") is not None]
    return Point(
        **means,
        lowest=min(accuracies),
        highest=max(accuracies),
        deviation=round(stdev(accuracies), 4) if len(accuracies) > 1 else 0.0,
        seeds=len(rows),
        curve=curve,
        perplexity=(fmean(of_texts), min(of_texts), max(of_texts)) if len(of_texts) == len(rows) else None,
    )


def representative(curves: Mapping[str, Sequence[Point]]) -> tuple[str, list[Point]]:
    """Return the curve that stands for a method, and what to call it."""
    all_curves = list(curves.values())
    sizes = [tuple(point.size for point in points) for points in all_curves]
    if len(all_curves) > 1 and len(set(sizes)) == 1:
        best = [max(points, key=lambda point: point.accuracy) for points in zip(*all_curves, strict=True)]
        return f"best of {len(all_curves)}", best
    name, points = max(curves.items(), key=lambda item: max(point.accuracy for point in item[1]))
    return name, list(points)
