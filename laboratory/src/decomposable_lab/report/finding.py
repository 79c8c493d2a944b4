"""The records below a folder. They may come from a stranger: what is no record is named and left out, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decomposable_edge.errors import DataError
from decomposable_lab.exhibits.catalogue import EXHIBITS

LARGEST = 1 << 25
"""Bytes of a file that are read: 32 MiB."""

_OF_EXHIBITS: Mapping[str, type] = {
    **dict.fromkeys(("exhibit", "title", "where", "scale"), str),
    **dict.fromkeys(("figures", "tables", "claims"), list),
}
_OF_RUNS: Mapping[str, type] = {"settings": dict, "sizes": list, "epochs": list}


@dataclass(frozen=True, eq=False)
class Found:
    """Hold what there is to show: exhibits, single runs, and other files; `missing` are exhibits of the paper that
    nobody has measured.
    """

    exhibits: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def find(folder: Path) -> Found:
    """Return a run, where the folder is that of one; else all exhibits below it."""
    if not folder.is_dir():
        came = "a file" if folder.exists() else "no such folder"
        raise DataError(f"{folder}: {came}; allowed: the folder of a run, or of results")
    found = Found()
    if (folder / "record.json").is_file():
        content = _read(folder / "record.json", _OF_RUNS)
        if content is None:
            raise DataError(f"{folder / 'record.json'}: it is not the record of a run; allowed: a folder of train")
        found.runs.append({**content, "folder": folder})
        return found
    for path in _candidates(folder):
        content = _read(path, _OF_EXHIBITS)
        if content is None:
            found.left_out.append(str(path.relative_to(folder)))
        else:
            found.exhibits.append({**content, "remarks": _remarks(path.parent.parent, content["exhibit"])})
    # What goes beyond the paper first, with the slider; then as the paper has them.
    order = ["beyond", *EXHIBITS]
    found.exhibits.sort(key=lambda each: order.index(each["exhibit"]) if each["exhibit"] in order else len(order))
    if not found.exhibits:
        raise DataError(
            f"{folder}: no exhibit in it; allowed: the folder of a run, or one with exhibits/NAME.json as "
            "decomposable-lab exhibits NAME makes them"
        )
    there = {each["exhibit"] for each in found.exhibits}
    found.missing.extend(name for name in EXHIBITS if name not in there)
    return found


def _remarks(folder: Path, exhibit: str) -> list[str]:
    """What people say of an exhibit: why a claim does not hold, and what was tried. remarks.json has it by name."""
    said = (_read(folder / "remarks.json", {}) or {}).get(exhibit, [])
    return [str(each) for each in said] if isinstance(said, list) else []


def _candidates(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("**/exhibits/*.json"))


def _read(path: Path, expected: Mapping[str, type]) -> dict[str, Any] | None:
    """Return the content, if it is of that kind."""
    try:
        if path.stat().st_size > LARGEST:
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_one = isinstance(content, dict) and all(isinstance(content.get(key), kind) for key, kind in expected.items())
    return content if is_one else None
