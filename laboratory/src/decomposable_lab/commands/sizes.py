"""`decomposable-lab sizes`: as `decomposable sizes`, also of a network of the laboratory."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from decomposable.commands import networks, sizes
from decomposable.network.file.container import open_container
from decomposable.training.evaluation import Row, smallest_within
from decomposable_edge.console import answer
from decomposable_edge.notes import measured_rows
from decomposable_edge.text import one_line
from decomposable_lab.methods.sized import KIND, sizes_of


def _run(options: argparse.Namespace) -> None:
    with open_container(options.file) as container:
        description = container.description
    if description.get("kind") == KIND:
        _show(options, description)
    else:
        sizes.VERB.run(options)


def _show(options: argparse.Namespace, description: Mapping[str, Any]) -> None:
    """Show the sizes of a method that does not decompose: those that it has, and no others."""
    named, method = _rows(options.file, description), one_line(description.get("method"), 80)
    drop = options.accuracy_drop
    if drop is not None:
        found = smallest_within([row for _, row in named], drop)
        if found is None:
            raise sizes.NotMeasuredError(
                f"{options.file} has no accuracies; measure them with: decomposable-lab evaluate"
            )
        named = [(name, row) for name, row in named if row == found]
    rows = [{"name": name, **row.as_dict()} for name, row in named]
    closing = f"\nThese are all its sizes: it was trained by the method {method}." if drop is None else None
    answer(options, {"file": str(options.file), "method": method, "sizes": rows}, networks.table(named), closing)


def _rows(path: Path, description: Mapping[str, Any]) -> list[tuple[str, Row]]:
    """Return the sizes under their own names, with the accuracies that the file knows."""
    known = {
        (row["macs"], row["params"]): accuracy
        for row, accuracy in measured_rows(description.get("info"))
        if type(row.get("macs")) is type(row.get("params")) is int
    }
    return [
        (size.name, Row.of(size.macs_fraction, size, known.get((size.macs, size.params))))
        for size in sizes_of(path, description)
    ]


VERB = replace(
    sizes.VERB,
    summary="what sizes a network file holds, of any method",
    example="decomposable-lab sizes runs/us-net/network.safetensors",
    run=_run,
)
