"""A section of the page for an exhibit or a run: a record, with all that the page reads of it in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Section:
    """What is shown under one heading."""

    id: str
    title: str
    where: str
    figures: Sequence[dict[str, Any]]
    tables: Sequence[Mapping[str, Any]]
    claims: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    remarks: Sequence[str] = ()
    runs: Mapping[str, Any] | None = None  # a table of the trainings behind it
    explorer: Mapping[str, Any] | None = None
    origin: Mapping[str, str] = field(default_factory=dict)


def of_exhibit(exhibit: Mapping[str, Any]) -> Section:
    """An exhibit as it was measured, the paper's own numbers behind ours."""
    return Section(
        id=f"exhibit-{exhibit['exhibit']}",
        title=exhibit["title"],
        where=f"{exhibit['where']}, {exhibit['scale']} scale",
        figures=[_figure(figure) for figure in exhibit["figures"]],
        tables=[*exhibit["tables"], *exhibit.get("printed", [])],
        claims=exhibit["claims"],
        notes=[str(note) for note in exhibit.get("notes", [])],
        remarks=exhibit.get("remarks", []),
        runs=_table_of_runs(exhibit.get("trainings")),
        explorer=exhibit.get("explorer"),
        origin=_origin(exhibit),
    )


def of_run(run: Mapping[str, Any]) -> Section:
    """Learning curves, sizes and ranks of one training."""
    epochs = run["epochs"]
    names = {"loss": "full network", "loss_low": "low-rank network"}
    losses = dict.fromkeys(key for each in epochs for key in each if key.startswith("loss"))
    figures = []
    if losses:
        series = [_by_epoch(epochs, key, names.get(key, key.replace("_", " "))) for key in losses]
        figures.append(_over_epochs("Loss by epoch", "loss", series))
    accuracy = _by_epoch(epochs, "accuracy", "full size")
    if len(accuracy["x"]) > 1:
        figures.append(_over_epochs("Test accuracy by epoch", "test accuracy (%)", [accuracy]))
    table = {
        "title": "Sizes",
        "columns": ["size", "MACs", "of all", "parameters", "of all", "accuracy (%)"],
        "rows": [_size(row) for row in run["sizes"] if isinstance(row, Mapping)],
    }
    return Section(
        id="run",
        title=f"{run.get('recipe', 'a run')}: {run['settings'].get('method', '')}",
        where=f"seed {run.get('seed', '–')}, {run.get('steps', '–')} steps",
        figures=[_figure(figure) for figure in figures],
        tables=[table],
        notes=[] if run.get("explorer") else ["Its network was not kept: ranks are not shown."],
        explorer=run.get("explorer"),
        origin=_origin(run),
    )


def _by_epoch(epochs: Sequence[Mapping[str, Any]], key: str, name: str) -> dict[str, Any]:
    having = [each for each in epochs if key in each]
    return {"name": name, "x": [each["epoch"] for each in having], "y": [each[key] for each in having]}


def _over_epochs(title: str, label: str, series: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"title": title, "x": {"label": "epoch"}, "y": {"label": label}, "series": series}


def _figure(figure: Mapping[str, Any]) -> dict[str, Any]:
    """A figure with all that the page reads of it."""
    series = [
        {
            "name": str(one.get("name", "")),
            **{key: list(one.get(key, [])) for key in ("x", "y", "low", "high")},
            "method": str(one.get("method", "")),
            **{key: bool(one.get(key)) for key in ("is_dashed", "is_points")},
        }
        for one in figure["series"]
    ]
    return {
        "title": str(figure["title"]),
        "kind": "bars" if figure.get("kind") == "bars" else "lines",
        "categories": list(map(str, figure.get("categories", []))),
        "note": str(figure.get("note", "")),
        "series": series,
        "x": _axis(figure["x"]),
        "y": _axis(figure["y"]),
    }


def _axis(axis: Mapping[str, Any]) -> dict[str, Any]:
    return {"label": str(axis.get("label", "")), "is_log": bool(axis.get("is_log"))}


def _origin(record: Mapping[str, Any]) -> dict[str, str]:
    """Command, commit and machine."""
    machine, trainings = record.get("machine") or {}, record.get("trainings")
    rows = {
        "command": str(record.get("command") or "–"),
        "commit": str(record.get("commit") or "–"),
        "made": str(record.get("made") or record.get("finished") or "–"),
        "machine": f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, PyTorch {machine.get('torch', '?')}",
    }
    if isinstance(trainings, list):
        rows["trainings"] = "; ".join(_training(each) for each in trainings if isinstance(each, Mapping))
    return rows


def _table_of_runs(trainings: Any) -> dict[str, Any] | None:
    """How many tries every training had, and where and when it was made."""
    groups = [each for each in trainings if isinstance(each, Mapping)] if isinstance(trainings, list) else []
    runs = [(group, run) for group in groups for run in group.get("runs", ()) if isinstance(run, Mapping)]
    if not runs:
        return None
    keys = ("method", "seed", "tries", "minutes", "commit", "cpu", "command")
    return {
        "title": "Trainings",
        "columns": ["on", "method", "seed", "tries", "minutes", "commit", "machine", "command"],
        "rows": [[str(group.get("title", "")), *(_said(run.get(key)) for key in keys)] for group, run in runs],
    }


def _said(value: Any) -> str:
    return "–" if value in (None, "") else str(value)


def _training(group: Mapping[str, Any]) -> str:
    methods, seeds = (", ".join(map(str, group.get(key, []))) for key in ("methods", "seeds"))
    return f"{group.get('title') or group.get('recipe')}: {methods}; seeds {seeds}"


def _size(row: Mapping[str, Any]) -> list[str]:
    def count(key: str) -> str:
        return f"{row[key]:,}" if isinstance(row.get(key), int) else "–"

    def part(key: str, digits: int) -> str:
        return f"{row[key]:.{digits}f}" if isinstance(row.get(key), int | float) else "–"

    costs = [count("macs"), part("macs_fraction", 3), count("params"), part("params_fraction", 3)]
    return [part("size", 2), *costs, part("accuracy", 2)]
