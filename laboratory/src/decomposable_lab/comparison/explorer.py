"""The sizes of a network for the page's slider: what each costs, what it reaches, and the rank of every layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn
from torch.nn.modules.conv import _ConvNd

from decomposable_edge.sizing.ranks import RankSelector

SIZES = 61


def explored(
    selector: RankSelector, measured: Sequence[Mapping[str, Any]], title: str, labels: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return sizes from the smallest measured one to the full one, in equal steps of a logarithm, as plain numbers.

    Accuracy between two measured sizes is interpolated by the logarithm of the MACs; which are measured is said.
    """
    rows = sorted((row for row in measured if _is_measured(row)), key=lambda row: row["macs_fraction"])
    places = np.log([row["macs_fraction"] for row in rows])
    accuracies = [row["accuracy"] for row in rows]
    smallest = max(selector.smallest_size, rows[0]["macs_fraction"]) if rows else selector.smallest_size
    asked = np.unique(np.geomspace(smallest, 1.0, SIZES))
    plans = {plan.ranks: plan for plan in (selector.of_size(float(min(1.0, size * (1 + 1e-9)))) for size in asked)}
    ordered = sorted(plans.values(), key=lambda plan: plan.macs or plan.params)
    names = list(ordered[-1].ranks)
    return {
        "title": title,
        "layers": list(labels or names),
        "full_ranks": [ordered[-1].full_ranks[name] for name in names],
        "measured": [[row["macs_fraction"], row["accuracy"]] for row in rows],
        "sizes": [
            {
                "size": plan.macs_fraction if plan.macs_fraction is not None else plan.params_fraction,
                "macs": plan.macs,
                "params": plan.params,
                "accuracy": float(np.interp(np.log(plan.macs_fraction), places, accuracies))
                if rows and plan.macs_fraction
                else None,
                "ranks": [plan.ranks[name] for name in names],
                "dense": [plan.runs_as(name) != "factors" for name in names],
            }
            for plan in ordered
        ],
    }


def readable(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return what people call layers: where a name is a mere number, the kind of the layer and which of them it is.

    >>> readable(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 2)), ["0", "2"])
    ['conv 1', 'linear 1']
    """
    counts: Counter[str] = Counter()
    labels = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | _ConvNd):
            kind = "linear" if isinstance(module, nn.Linear) else "conv"
            counts[kind] += 1
            labels[name] = f"{kind} {counts[kind]}"
    return [labels.get(name, name) if name.replace(".", "").isdigit() else name for name in names]


def _is_measured(row: Mapping[str, Any]) -> bool:
    return (
        all(isinstance(row.get(key), int | float) for key in ("macs_fraction", "accuracy")) and row["macs_fraction"] > 0
    )
