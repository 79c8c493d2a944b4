"""`decomposable-lab compare`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decomposable.commands import arguments, networks
from decomposable.progress import Progress, ProgressLine, progress_line
from decomposable_edge.console import Verb, answer, as_table
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.commands.options import add as add_shared
from decomposable_lab.commands.options import how_of, seeds

if TYPE_CHECKING:
    from decomposable_lab.comparison.parts import Comparison

SHOWN_SIZES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.1)
MEASURED = {"accuracy": "test accuracy (%)", "perplexity": "perplexity of the test text"}


def _options(parser: argparse.ArgumentParser) -> None:
    arguments.add(parser, "recipe")
    parser.add_argument("--methods", metavar="LIST", default="all", help="some of them, or all (default: all)")
    add_shared(parser, seeds="0", folder="the folder of the comparison")


def _run(options: argparse.Namespace) -> None:
    with progress_line(options) as line:
        line(Progress("", "reading the recipe"))
        _compare(options, line)


def _compare(options: argparse.Namespace, line: ProgressLine) -> None:
    from decomposable import recipes
    from decomposable.training.methods.flat import from_text
    from decomposable_lab.comparison import running
    from decomposable_lab.comparison.watching import Watchers
    from decomposable_lab.methods.sweeps import default_settings

    settings = from_text(default_settings(recipes.find(options.recipe)), options.set)
    if options.out is None:
        raise InvalidArgumentError("--out is needed: the folder of the comparison, as in --out runs/comparison")
    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    how = how_of(options)
    shared = arguments.taken(options, "out", "data", "device", "checkpoint_seconds", "command")
    comparison, circumstances = running.prepare(
        options.recipe,
        names=names,
        seeds=seeds("0" if options.seeds is None else options.seeds),
        settings=settings,
        **shared,
    )
    parts = how.own(comparison.parts)
    if options.dry_run:
        jobs = running.number_of_jobs(options.jobs, circumstances.device)
        _dry_run(options, replace(comparison, parts=tuple(parts)), circumstances, jobs, line)
        return
    watchers = Watchers(progress=line, say=line.say, detail=line.detail)
    content, failures = running.run(comparison, circumstances, watchers=watchers, how=how, parts=parts)
    line.close()
    missing = running.missing_names(comparison, failures)
    if missing:
        content = {**content, "missing": missing}
    figure = _draw(options.out, content)
    where = f"\nOne record for each method and seed is in {options.out}, all curves in its comparison.json"
    answer(options, content, as_text(content), where, figure, running.what_is_missing(missing, how.shard))
    if options.json:
        print(figure, file=sys.stderr)
    if failures:
        raise running.PartsFailedError(failures, len(comparison.parts))


def _dry_run(
    options: argparse.Namespace, comparison: Comparison, circumstances: Any, jobs: int, progress: ProgressLine
) -> None:
    from decomposable.progress import as_duration
    from decomposable_lab.comparison.estimate import estimate, total_seconds
    from decomposable_lab.comparison.running import check_finished

    check_finished(comparison, circumstances)
    estimates = estimate(comparison, circumstances, jobs=jobs, progress=progress)
    progress.close()
    seconds = total_seconds(estimates, jobs)
    rows = [entry.as_plain() for entry in estimates]
    content = {"trainings": rows, "jobs": jobs, "seconds": round(seconds, 1), "added": comparison.added}
    cells = []
    for entry in estimates:
        about = "" if entry.state in ("done", "cannot") else as_duration(entry.seconds)
        cells.append((entry.part.method, str(entry.part.seed), entry.part.training.folder, entry.state, about))
    states = [entry.state for entry in estimates]
    counts = [f"{states.count(state)} {state}" for state in ("done", "cut off", "to do", "cannot") if state in states]
    took = f"about {as_duration(seconds)} on this machine, {jobs} at a time"
    answer(
        options,
        content,
        as_table(("method", "seed", "training", "state", "about"), cells),
        *(f"{needed} is trained as well: {name} starts from it" for needed, name in comparison.added.items()),
        *(f"{entry.part.name} cannot be trained: {entry.reason}" for entry in estimates if entry.reason),
        f"\ntrainings: {len(states)} ({', '.join(counts)}); {took}. Nothing was trained.",
    )


def as_text(content: Mapping[str, Any]) -> str:
    """Return every method's accuracy at a few sizes, or of a text its perplexity."""
    from decomposable_lab.comparison.figure import measured_by

    of_seeds, measured = content["seeds"], measured_by(content)
    sizes = content["sizes"] if len(content["sizes"]) <= len(SHOWN_SIZES) else SHOWN_SIZES
    shown = {name: method["shown"] for name, method in content["methods"].items()}
    rows = [(name, it["label"], *(_cell(it["points"], size, measured) for size in sizes)) for name, it in shown.items()]
    header = ("method", "curve", *(f"{size:g}" for size in sizes))
    spread = f", mean of seeds {', '.join(map(str, of_seeds))} ± half the range" if len(of_seeds) > 1 else ""
    return (
        f"{content['recipe']}: {MEASURED[measured]} within a part of the original's MACs{spread}\n\n"
        + as_table(header, rows)
        + "\n\nEach cell is the largest size of the method that fits; - where none does."
    )


def _cell(points: list[Mapping[str, Any]], size: float, measured: str) -> str:
    """Return what the largest size within a budget reaches."""
    from decomposable_lab.comparison.figure import spread_of

    fitting = [point for point in points if point["macs_fraction"] <= size * (1 + 1e-9)]
    if not fitting:
        return "-"
    point = max(fitting, key=lambda point: point["macs_fraction"])
    mean, lowest, highest = spread_of(point, measured)
    digits = 1 if measured == "accuracy" else 2
    return f"{mean:.{digits}f}" + (f" ±{(highest - lowest) / 2:.{digits}f}" if point["seeds"] > 1 else "")


def _draw(out: Path, content: Mapping[str, Any]) -> str:
    """Write the figure, if what it takes is installed; what to say about it."""
    from decomposable_lab.comparison import captions, figure

    if not content["methods"]:
        return "No figure: nothing is trained yet"
    title = captions.title_of(content, out)
    return networks.write_figure(out / "comparison.png", lambda: figure.draw(content, title=title), again="")


VERB = Verb(
    name="compare",
    summary="train several methods under one protocol, and draw accuracy over MACs",
    description=(
        "Train and measure several methods with the same model, data, settings and cost model. What is missing in DIR\n"
        "is trained, what was cut off (Ctrl-C is safe) goes on, what is done is not done again. DIR then holds\n"
        "  METHOD/SEED/record.json  settings, sizes (MACs, parameters, accuracy); beside it the network at its sizes\n"
        "  comparison.json          every method's curves, mean and spread over the seeds\n"
        "  comparison.png           accuracy over MACs\n\n"
        "methods: plain         normal learning, then decomposed by both forms and every criterion\n"
        "         width         the same network with 0.75 and 0.5 of the channels\n"
        "         scratch       the factored network at Decomposable-Net's ranks\n"
        "         trp           trained rank pruning, over a sweep of its two parameters\n"
        "         tucker        Tucker-2 with VBMF ranks, fine-tuned; also by channel and spatial form\n"
        "         slimmable     four widths, a batch normalisation for each\n"
        "         us-net        universally slimmable: any width\n"
        "         decomposable  Decomposable-Net\n"
        "         elastic       the same at random budgets, taught by the full network, in turns\n"
        "         tucker starts from plain's network, scratch from decomposable's ranks: these are trained as well\n\n"
        + arguments.RECIPES
    ),
    example=(
        "decomposable-lab compare digits --methods plain,us-net,elastic --seeds 0,1 --out runs/digits-comparison\n"
        "  decomposable-lab compare cifar10-resnet20 --data DIR --methods all --out runs/comparison --dry-run\n"
        "  decomposable-lab compare cifar10-resnet20 --data DIR --out runs/comparison --shard 2/8"
    ),
    add_options=_options,
    run=_run,
    if_interrupted="the same command goes on from the last checkpoints",
)
