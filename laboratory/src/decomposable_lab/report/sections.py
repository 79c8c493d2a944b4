"""A section of the page for an exhibit: a record, with all that the page reads of it in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decomposable_lab.report.trainings import Trained, groups_in, trained, what_was_measured

KINDS = ("lines", "bars", "dots")
OURS = frozenset({"beyond"})
"""Exhibits whose claims are this project's own goals, in files that do not say so."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Section:
    """Hold what is shown under one heading."""

    id: str
    title: str
    name: str = ""  # of the figure or table in the paper
    where: str
    figures: Sequence[dict[str, Any]]
    tables: Sequence[Mapping[str, Any]]
    claims: Sequence[Mapping[str, Any]] = ()
    is_ours: bool = False  # the claims are this project's goals, not the paper's
    notes: Sequence[str] = ()
    remarks: Sequence[str] = ()
    trained: Sequence[Trained] = ()
    explorers: Sequence[Mapping[str, Any]] = ()
    origin: Mapping[str, str] = field(default_factory=dict)


def of_exhibit(exhibit: Mapping[str, Any]) -> Section:
    """Return an exhibit as it was measured, the paper's own numbers behind ours."""
    measured = what_was_measured(exhibit.get("trainings"))
    where = f"{exhibit['where']}, {exhibit['scale']} scale"
    return Section(
        id=id_of(exhibit["exhibit"]),
        title=exhibit["title"],
        name=exhibit["where"],
        where=f"{where} · {measured}" if measured else where,
        figures=[figure_of(figure) for figure in exhibit["figures"]],
        tables=[*exhibit["tables"], *exhibit.get("printed", [])],
        claims=exhibit["claims"],
        is_ours=bool(exhibit.get("is_ours", exhibit["exhibit"] in OURS)),
        notes=[str(note) for note in exhibit.get("notes", [])],
        remarks=exhibit.get("remarks", []),
        trained=trained(exhibit.get("trainings")),
        explorers=_explorers(exhibit),
        origin=origin_of(exhibit),
    )


def id_of(exhibit: str) -> str:
    """Return the id of its section."""
    return f"exhibit-{exhibit}"


def _explorers(exhibit: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the networks with a slider: several, or one as older files have it."""
    several = exhibit.get("explorers")
    return [each for each in (several or [exhibit.get("explorer")]) if isinstance(each, Mapping)]


def figure_of(figure: Mapping[str, Any]) -> dict[str, Any]:
    """Return a figure with all that the page reads of it."""
    series = [
        {
            "name": str(one.get("name", "")),
            **{key: list(one.get(key) or []) for key in ("x", "y", "low", "high")},
            "method": str(one.get("method") or ""),
            **{key: bool(one.get(key)) for key in ("is_dashed", "is_points", "is_hollow")},
        }
        for one in figure["series"]
    ]
    return {
        "title": str(figure["title"]),
        "kind": figure["kind"] if figure.get("kind") in KINDS else KINDS[0],
        "categories": list(map(str, figure.get("categories") or [])),
        "note": str(figure.get("note") or ""),
        "spread": str(figure.get("spread", "over the seeds")),
        "series": series,
        "x": _axis(figure["x"]),
        "y": _axis(figure["y"]),
    }


def _axis(axis: Mapping[str, Any]) -> dict[str, Any]:
    return {"label": str(axis.get("label", "")), "is_log": bool(axis.get("is_log"))}


def origin_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Write command, commit and machine; and the trainings, if no table says more of them."""
    machine, groups = record.get("machine") or {}, groups_in(record.get("trainings"))
    rows = {
        "command": str(record.get("command") or "–"),
        "commit": str(record.get("commit") or "–"),
        "made": str(record.get("made") or record.get("finished") or "–"),
        "machine": f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, PyTorch {machine.get('torch', '?')}",
    }
    if kept := record.get("measurements"):
        rows["measured"] = "; ".join(dict.fromkeys(map(_measurement, kept)))
    if groups and not trained(groups):
        rows["trainings"] = "; ".join(map(_training, groups))
    return rows


def _measurement(kept: Mapping[str, Any]) -> str:
    """Of what was measured before the exhibit was put together."""
    machine = (kept.get("machine") or {}).get("cpu", "?")
    return f"{kept.get('what', '?')}: {kept.get('made', '?')}, commit {kept.get('commit', '?')}, {machine}"


def _training(group: Mapping[str, Any]) -> str:
    methods, seeds = (", ".join(map(str, group.get(key, []))) for key in ("methods", "seeds"))
    return f"{group.get('title') or group.get('recipe')}: {methods}; seeds {seeds}"
