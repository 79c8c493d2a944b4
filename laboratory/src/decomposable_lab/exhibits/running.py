"""Train what an exhibit still lacks, measure it, and keep what came out.

OUT/GROUP/…                 trainings under one protocol: the folder of a comparison, shared by exhibits
OUT/exhibits/NAME.json      the exhibit as it was measured: figures, tables, claims, and where all of it comes from
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from decomposable.progress import Report
from decomposable.training import records
from decomposable.training.devices import choose_device
from decomposable_edge.errors import DataError, DecomposableError, InvalidArgumentError
from decomposable_edge.files import write_atomically
from decomposable_edge.machine import timestamp
from decomposable_lab.comparison import running
from decomposable_lab.comparison.estimate import Estimate, StepClock, estimate, total_seconds, without_data
from decomposable_lab.comparison.parts import Circumstances, Comparison, prepare
from decomposable_lab.comparison.sharding import bundles
from decomposable_lab.comparison.watching import Failures, Watchers
from decomposable_lab.exhibits.catalogue import EXHIBITS, Exhibit, find
from decomposable_lab.exhibits.context import Context
from decomposable_lab.exhibits.scales import SCALES, Group, Scale, merged
from decomposable_lab.methods.ours import trainings_of

FORMAT = 1
STRUCTURE = ("form", "vbmf_form", "width")
"""Settings that say which network is trained, and not how."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """Hold what was asked for: some exhibits at one scale."""

    exhibits: Sequence[Exhibit]
    scale: Scale
    out: Path
    data: Path | None = None
    how: Mapping[str, Any] = field(default_factory=dict)  # device, checkpoint_seconds, command

    @property
    def groups(self) -> list[Group]:
        """Return all trainings, each folder once."""
        return merged(group for exhibit in self.exhibits for group in exhibit.groups(self.scale))

    def prepared(self, group: Group) -> tuple[Comparison, Circumstances]:
        """Return the comparison of a group, checked."""
        return prepare(
            group.recipe,
            out=self.out / group.folder,
            names=group.methods,
            seeds=group.seeds,
            data=self.data,
            overrides=group.settings,
            **self.how,
        )


def ordered(
    name: str,
    scale: str,
    *,
    only: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    overrides: Mapping[str, Any] | None = None,
    **rest: Any,
) -> Order:
    """Return the order for one exhibit, or for all; large comparisons on all networks, or on `only` some; with other
    seeds or settings than the scale's where they are given, such as a few steps only.
    """
    if scale not in SCALES:
        raise InvalidArgumentError(f"--scale {scale}: unknown; allowed: {', '.join(SCALES)}")
    exhibits = list(EXHIBITS.values()) if name == "all" else [find(name)]

    def change(group: Group) -> Group:
        group = group if seeds is None else replace(group, seeds=tuple(seeds))
        return group.with_settings(overrides or {})

    return Order(exhibits=exhibits, scale=SCALES[scale].on(only).of_each(change), **rest)


def estimated(order: Order, *, jobs: int | None, progress: Report) -> tuple[list[tuple[Group, Estimate]], float]:
    """Return every training, about how long it takes, and about how long all of them take whose data are there."""
    found: list[tuple[Group, Estimate]] = []
    seconds = 0.0
    clocks: dict[str, StepClock] = {}  # by recipe: its groups have the same network and images
    for group in order.groups:
        comparison, circumstances = order.prepared(group)
        count = running.number_of_jobs(jobs, circumstances.device)
        clock = clocks.setdefault(group.recipe, StepClock(comparison.settings, circumstances))
        try:
            estimates = estimate(comparison, circumstances, jobs=count, progress=progress, clock=clock)
        except DataError as error:
            estimates = without_data(comparison, str(error))
        seconds += total_seconds(estimates, count)
        found += [(group, each) for each in estimates]
    return found, seconds


def run(order: Order, *, watchers: Watchers, how: running.How) -> tuple[dict[str, dict[str, Any]], Failures]:
    """Train what is missing, then measure every exhibit whose trainings are complete; what failed comes back, too.

    A shard trains its share of each group, and measures nothing: others may be at work still.
    """
    failures: Failures = {}
    missing: list[str] = []
    before = 0
    for group in order.groups:
        watchers.say(f"{group.folder}: {', '.join(group.methods)}")
        comparison, circumstances = order.prepared(group)
        parts = how.own(comparison.parts, before)
        before += len(bundles(comparison.parts))
        _, failed = running.run(comparison, circumstances, watchers=watchers, how=how, parts=parts)
        failures.update({f"{group.folder}/{name}": reason for name, reason in failed.items()})
        missing += [f"{group.folder}/{name}" for name in running.missing_names(comparison, failed)]
    found: dict[str, dict[str, Any]] = {}
    if how.shard is not None:
        watchers.say(running.what_is_missing(missing, how.shard) or "all trainings are done")
        watchers.say("a shard measures nothing: the same command without --shard does, when all trainings are done")
        return found, failures
    for exhibit in order.exhibits:
        needed = {(group.folder, method) for group in exhibit.groups(order.scale) for method in group.methods}
        broken = [name for name in failures if tuple(name.split("/")[:2]) in needed]
        if broken:
            watchers.say(f"{exhibit.name}: not measured, because {broken[0]} failed")
            continue
        watchers.say(f"{exhibit.name}: measuring")
        try:
            found[exhibit.name] = measured(exhibit, order, watchers.progress)
        except DecomposableError as error:  # such as a network that was not kept: the others can be measured
            watchers.say(f"{exhibit.name}: not measured: {error}")
            failures[exhibit.name] = str(error)
    return found, failures


def measured(exhibit: Exhibit, order: Order, report: Report) -> dict[str, Any]:
    """Return the exhibit as it is now, written to its file."""
    groups = merged(exhibit.groups(order.scale))
    device = torch.device(choose_device(order.how.get("device", "auto")))
    context = Context(order.scale, order.out, order.data, report, device)
    shown = exhibit.measure(context)
    command = str(order.how.get("command", ""))
    content: dict[str, Any] = {
        "format": FORMAT,
        "exhibit": exhibit.name,
        "where": exhibit.where,
        "title": exhibit.title,
        "scale": order.scale.name,
        "made": timestamp(),
        "command": records.command_without_folders(command) if command else "",
        "commit": records.commit(),
        "machine": records.machine(),
        "trainings": [
            {
                "folder": group.folder,
                "title": group.title,
                "recipe": group.recipe,
                "methods": list(group.methods),
                "seeds": list(group.seeds),
                "settings": dict(group.settings),
                "runs": _runs(order.out / group.folder, group),
            }
            for group in groups
        ],
        "measurements": context.measurements,
        **shown.as_plain(),
        "is_ours": exhibit.is_ours,
        "printed": [asdict(table) for table in exhibit.printed],
    }
    path = order.out / "exhibits" / f"{exhibit.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    return content


def _runs(folder: Path, group: Group) -> list[dict[str, Any]]:
    """Where every training of a group comes from: how many tries it had, its command, commit, machine and minutes."""
    found = []
    for method in group.methods:
        for seed in group.seeds:
            path = folder / method / str(seed)
            if not (path / "record.json").is_file():
                continue
            record = json.loads((path / "record.json").read_text())
            each = [json.loads(part.read_text()) for part in sorted(path.glob("*/record.json"))] or [record]
            found.append(
                {
                    "method": method,
                    "seed": seed,
                    "tries": _tries(method, group),
                    "command": "; ".join(dict.fromkeys(part["command"] for part in each if part.get("command"))),
                    "commit": ", ".join(dict.fromkeys(str(part["commit"]) for part in each if part.get("commit"))),
                    "cpu": (record.get("machine") or {}).get("cpu"),
                    "minutes": round(record.get("training_seconds", 0) / 60, 1),
                }
            )
    return found


def _tries(method: str, group: Group) -> int:
    """With how many settings a method was trained of which the best counts: forms, widths and ranks are no tries."""
    trainings = trainings_of(method, group.all_settings)
    return len({tuple((k, v) for k, v in t.settings.items() if k not in STRUCTURE) for t in trainings})
