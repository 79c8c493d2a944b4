"""The trainings behind an exhibit, by network: a row for each method, and every command once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Group = Mapping[str, Any]
NOTHING = "–"


@dataclass(frozen=True)
class Trained:
    """Hold what was trained on one network: a table, and which command trained what."""

    table: dict[str, Any]
    commands: Mapping[str, str]  # methods, by command


def groups_in(trainings: Any) -> list[Group]:
    """Return what of a record's trainings can be read."""
    return [each for each in trainings if isinstance(each, Mapping)] if isinstance(trainings, list) else []


def what_was_measured(trainings: Any) -> str:
    """Write networks and seeds in words.

    >>> what_was_measured([{"title": "a CNN, 4 epochs", "seeds": [0, 1]}, {"title": "a ViT", "seeds": [0]}])
    'a CNN, 4 epochs · seeds 0 and 1; a ViT · seed 0'
    """
    seeds: dict[str, dict[str, None]] = {}
    for group in groups_in(trainings):
        if title := str(group.get("title") or group.get("recipe") or ""):
            seeds.setdefault(title, {}).update(dict.fromkeys(_texts(group.get("seeds"))))
    return "; ".join(f"{title}{_of_seeds(list(found))}" for title, found in seeds.items())


def _of_seeds(seeds: Sequence[str]) -> str:
    if not seeds:
        return ""
    return f" · seed {seeds[0]}" if len(seeds) == 1 else f" · seeds {', '.join(seeds[:-1])} and {seeds[-1]}"


def _texts(values: Any) -> list[str]:
    return [str(value) for value in values] if isinstance(values, list) else []


def trained(trainings: Any) -> list[Trained]:
    """Return what was trained on each network, where the record says it."""
    networks: dict[str, list[Group]] = {}
    for group in groups_in(trainings):
        networks.setdefault(str(group.get("title") or group.get("recipe") or "Trainings"), []).append(group)
    found = [_on_network(title, groups) for title, groups in networks.items()]
    return [each for each in found if each.table["rows"]]


def _on_network(title: str, groups: Sequence[Group]) -> Trained:
    """Return one row for the seeds of a method that have the same commit and machine."""
    rows: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    commands: dict[str, dict[str, None]] = {}
    for group, own in zip(groups, _own_settings(groups), strict=True):
        for run in group.get("runs") or ():
            if isinstance(run, Mapping):
                method = f"{_or_nothing(run.get('method'))}{f' ({own})' if own else ''}"
                key = (method, *(_or_nothing(run.get(name)) for name in ("tries", "commit", "cpu")))
                rows.setdefault(key, []).append(run)
                commands.setdefault(_or_nothing(run.get("command")), {})[method] = None
    table = {
        "title": title,
        "columns": ["method", "seeds", "tries", "minutes", "commit", "machine"],
        "rows": [
            [method, _listed(runs, "seed"), tries, _listed(runs, "minutes"), commit, cpu]
            for (method, tries, commit, cpu), runs in rows.items()
        ],
    }
    return Trained(table, {command: ", ".join(methods) for command, methods in commands.items()})


def _own_settings(groups: Sequence[Group]) -> list[str]:
    """Return what tells trainings of one network apart, such as their λ."""
    settings = [dict(each) if isinstance(each := group.get("settings"), Mapping) else {} for group in groups]
    return [
        ", ".join(
            f"{key}={value}"
            for key, value in each.items()
            if any(other.get(key, NOTHING) != value for other in settings)
        )
        for each in settings
    ]


def _listed(runs: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(_or_nothing(run.get(key)) for run in runs)


def _or_nothing(value: Any) -> str:
    return NOTHING if value in (None, "") else str(value)
