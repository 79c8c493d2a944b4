"""All that is in the folder of a comparison, of earlier commands too: a record for each method and seed, a summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from decomposable import methods
from decomposable.comparison.parts import Comparison, Part, plan
from decomposable.comparison.preparing import Circumstances, finished
from decomposable.comparison.results import summary
from decomposable.comparison.scheduling import Failures
from decomposable.errors import DecomposableError
from decomposable.files import write_atomically


def gather(comparison: Comparison, circumstances: Circumstances, failures: Failures) -> dict[str, Any]:
    """Write the record of every method and seed that is complete, and the summary of all that is in the folder."""
    everything = _all_in_folder(comparison, circumstances)
    for name in everything.methods:
        for seed in everything.seeds:
            parts = [part for part in everything.parts if (part.method, part.seed) == (name, seed)]
            if parts and parts[0].training.folder and all(part.is_done for part in parts):
                _write_record(comparison, parts)
    content = {**summary(everything), "failed": failures}
    write_atomically(comparison.out / "comparison.json", (json.dumps(content, indent=1) + "\n").encode())
    return content


def _all_in_folder(comparison: Comparison, circumstances: Circumstances) -> Comparison:
    """With the methods and seeds of earlier commands, as far as their settings are the same."""
    found = {int(path.name) for name in methods.METHODS for path in _folders(comparison.out / name)}
    seeds = sorted({*comparison.seeds, *found})
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


def _belongs(part: Part, circumstances: Circumstances) -> bool:
    """Whether a part that nobody asked for is done under these settings."""
    if not part.can_be_read:
        return False
    try:
        finished(part, circumstances)
    except (DecomposableError, OSError):
        return False
    return True


def _folders(path: Path) -> list[Path]:
    return [folder for folder in path.iterdir() if folder.name.isdigit()] if path.is_dir() else []


def _write_record(comparison: Comparison, parts: Sequence[Part]) -> None:
    """One record for the trainings of one method and seed."""
    found = {part.training.folder: part.folder.finished() or {} for part in parts}
    first = next(iter(found.values()))
    rows = [{**row, "training": folder} for folder, record in found.items() for row in record["sizes"]]
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
        "sizes": rows,
    }
    path = comparison.out / parts[0].method / str(parts[0].seed) / "record.json"
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
