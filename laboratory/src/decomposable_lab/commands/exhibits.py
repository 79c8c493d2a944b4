"""`decomposable-lab exhibits`: a figure or table of the paper, trained, measured and judged."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from decomposable.commands import arguments
from decomposable.progress import Progress, ProgressLine, as_duration, progress_line
from decomposable_edge.console import Verb, answer, as_table
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.commands.options import add as add_shared
from decomposable_lab.commands.options import how_of, seeds

NAMES = (
    "exhibits: 2a 2b 2c 2d 2e 2f 3a 3b 3c table-1 table-2 section-4.4 appendix-a appendix-channel appendix-e\n"
    "          proposition-1 proposition-2 beyond; or all (docs/paper.md)"
)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("exhibit", metavar="NAME", help="a figure or table of the paper, or all")
    parser.add_argument("--scale", metavar="SCALE", help="paper (GPUs, days) or laptop (hours)")
    only = "of the recipes that methods are compared on, these, as in fashion-mnist (default: all)"
    parser.add_argument("--only", metavar="LIST", help=only)
    add_shared(parser, seeds="those of the scale", folder="the folder of all exhibits")


def _run(options: argparse.Namespace) -> None:
    with progress_line(options) as line:
        line(Progress("", "reading the recipes"))
        _exhibit(options, line)


def _exhibit(options: argparse.Namespace, line: ProgressLine) -> None:
    """Train what the exhibit lacks, measure it, and say which claims hold."""
    from decomposable_lab.comparison.running import PartsFailedError
    from decomposable_lab.comparison.watching import Watchers
    from decomposable_lab.exhibits import running

    how = how_of(options)
    order = _order(options)
    if options.dry_run:
        _dry_run(options, order, line)
        return
    watchers = Watchers(progress=line, say=line.say, detail=line.detail)
    found, failures = running.run(order, watchers=watchers, how=how)
    line.close()
    texts = [as_text(content) for content in found.values()]
    where = (
        f"\nAll of it is in {options.out / 'exhibits'}; as a page: decomposable-lab report {options.out} -o report.html"
    )
    answer(options, found, "\n\n".join(texts), where if found else None)
    if failures:
        raise PartsFailedError(failures, len(failures) + 1)


def _order(options: argparse.Namespace) -> Any:
    from decomposable.recipes.values import Text
    from decomposable_lab.exhibits import running

    if options.scale is None:
        raise InvalidArgumentError("--scale is needed; allowed: paper, laptop")
    if options.out is None:
        raise InvalidArgumentError("--out is needed: the folder of all exhibits, as in --out runs/paper")
    overrides = {}
    for assignment in options.set:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise InvalidArgumentError(f"--set {assignment}: there is no '='; allowed: key=value, as in epochs=1")
        overrides[name.strip()] = Text(text.strip())
    only = None if options.only is None else [name.strip() for name in options.only.split(",") if name.strip()]
    return running.ordered(
        options.exhibit,
        options.scale,
        only=only,
        seeds=None if options.seeds is None else seeds(options.seeds),
        overrides=overrides,
        how=arguments.taken(options, "device", "checkpoint_seconds", "command"),
        **arguments.taken(options, "out", "data"),
    )


def _dry_run(options: argparse.Namespace, order: Any, line: ProgressLine) -> None:
    from decomposable_lab.exhibits import running

    found, seconds = running.estimated(order, jobs=options.jobs, progress=line)
    line.close()
    rows = [{"group": group.folder, **entry.as_plain()} for group, entry in found]
    states = [entry.state for _, entry in found]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    whole = " for the others" if "no data" in states else ""
    answer(
        options,
        {"trainings": rows, "seconds": round(seconds, 1)},
        as_table(("group", "method", "seeds", "trainings", "to do", "about"), _by_method(found)),
        *dict.fromkeys(_why_not(group.folder, entry) for group, entry in found if entry.reason),
        f"\ntrainings: {len(found)} ({', '.join(counts)}); about {as_duration(seconds)} here{whole}. "
        "Nothing was trained.",
    )


def _by_method(found: Sequence[tuple[Any, Any]]) -> list[tuple[str, ...]]:
    """A row for each method of each group: the paper's grids have thousands of trainings, all of which --json lists."""
    rows: dict[tuple[str, str], list[Any]] = {}
    for group, entry in found:
        rows.setdefault((group.folder, entry.part.method), []).append(entry)
    return [
        (
            *key,
            ",".join(map(str, dict.fromkeys(entry.part.seed for entry in entries))),
            str(len(entries)),
            str(sum(entry.state != "done" for entry in entries)),
            _about(entries),
        )
        for key, entries in rows.items()
    ]


def _why_not(folder: str, entry: Any) -> str:
    """Of a method that cannot train the model, or of a whole group without its data."""
    what = folder if entry.state == "no data" else f"{folder}/{entry.part.method}"
    return f"{what} cannot be trained here: {entry.reason}"


def _about(entries: Sequence[Any]) -> str:
    """Return how long these take, or why nobody knows."""
    states = {entry.state for entry in entries}
    return next((state for state in ("no data", "cannot") if state in states), "") or (
        "" if states == {"done"} else as_duration(sum(entry.seconds for entry in entries))
    )


def as_text(content: Mapping[str, Any]) -> str:
    """Return the claims of an exhibit, each with what was seen."""
    from decomposable_lab.report.verdicts import VERDICTS

    lines = [f"{content['exhibit']} ({content['where']}): {content['title']}"]
    for claim in content["claims"]:
        on = f" ({claim['on']})" if claim.get("on") else ""
        lines.append(f"  {VERDICTS[claim['verdict']]:>13}  {claim['text']}{on}\n{'':>17}{claim['seen']}")
    return "\n".join(lines)


VERB = Verb(
    name="exhibits",
    summary="train, measure and judge a figure or table of the paper",
    description=(
        "Reproduce a figure or table of the paper: what it lacks in DIR is trained, then it is measured, and\n"
        "DIR/exhibits/NAME.json holds its figures and which of its claims hold. What was cut off goes on.\n\n" + NAMES
    ),
    example=(
        "decomposable-lab exhibits 2b --scale laptop --data DIR --out runs/paper\n"
        "  decomposable-lab exhibits all --scale laptop --data DIR --out runs/paper --dry-run"
    ),
    add_options=_options,
    run=_run,
    if_interrupted="the same command goes on from the last checkpoints",
)
