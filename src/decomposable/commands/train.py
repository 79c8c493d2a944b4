"""`decomposable train`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decomposable.commands import arguments, networks
from decomposable.progress import Progress, ProgressLine, progress_line
from decomposable_edge.console import Verb, answer, is_first_process
from decomposable_edge.errors import InvalidArgumentError

if TYPE_CHECKING:
    from decomposable.recipes.settings import Settings
    from decomposable.training.evaluation import Row
    from decomposable.training.runs import Job


def _options(parser: argparse.ArgumentParser) -> None:
    arguments.add(parser, "recipe", "--data")
    lists = "settings to replace, such as epochs=10 ratio=0.01,0.5 (--dry-run lists them all)"
    arguments.add(parser, "--set", help=lists)
    parser.add_argument("--out", metavar="RUN", type=Path, help="the folder of the run")
    start = (
        "start from these weights (a state dict: .safetensors, .pt, .pth; or a network.safetensors); the learning "
        "rate is then fine_tune_learning_rate"
    )
    parser.add_argument("--init", metavar="FILE", type=Path, help=start)
    parser.add_argument("--resume", action="store_true", help="go on where the run in RUN was cut off, or start it")
    arguments.add(parser, "--device", "--checkpoint-seconds")
    parser.add_argument("--dry-run", action="store_true", help="show the settings, and train nothing")
    parser.set_defaults(default_settings=None)  # an extension may give a recipe others


def _run(options: argparse.Namespace) -> None:
    options.quiet |= not is_first_process()
    with progress_line(options) as line:
        if not options.dry_run:
            line(Progress("", "reading the recipe"))  # at once: importing PyTorch takes a while
        _train(options, line)


def _train(options: argparse.Namespace, line: ProgressLine) -> None:
    from decomposable.training import experiment
    from decomposable.training.distributed import agreed, joined, silent_but_one

    if options.dry_run:
        if is_first_process():
            _show(options)
        return
    with silent_but_one(), joined(options.device) as (processes, options.device):
        job = agreed(processes, lambda: _job(options))
        record = experiment.run(job, progress=line, say=line.say, processes=processes)
        line.close()
        if processes.is_first:
            _tell(options, job, record)


def _settings(options: argparse.Namespace) -> Settings:
    from decomposable import recipes
    from decomposable.training import methods
    from decomposable.training.methods.flat import from_text

    default_settings = options.default_settings or recipes.default_settings
    settings = from_text(default_settings(recipes.find(options.recipe)), options.set)
    methods.find(settings.method)  # an unknown one is refused before a dry run, too
    return settings


def _show(options: argparse.Namespace) -> None:
    from decomposable.training.methods.flat import flat

    values = flat(_settings(options))
    answer(options, values, *(f"{name}={_as_typed(value)}" for name, value in values.items()))


def _job(options: argparse.Namespace) -> Job:
    from decomposable.training import experiment

    settings = _settings(options)
    if options.out is None:
        raise InvalidArgumentError("--out is needed: the folder to write the run to, as in --out runs/first")
    how = arguments.taken(options, "out", "data", "init", "resume", "device", "checkpoint_seconds", "command")
    return experiment.prepare(options.recipe, settings=settings, **how)


def _tell(options: argparse.Namespace, job: Job, record: Mapping[str, Any]) -> None:
    from decomposable.training.evaluation import Row

    rows = [Row(**row) for row in record["sizes"]]
    table = networks.table([(f"{row.size:g}", row) for row in rows])
    figure = _draw(job, rows)
    program = options.command.split()[0]  # of an extension it is another one
    where = f"\nEvery size is in one file; see: {program} sizes {job.folder.network}"
    answer(options, record, table, where, figure)


def _draw(job: Job, rows: Sequence[Row]) -> str:
    """Draw accuracy (of a text perplexity) over size, where that is not done yet; return what to say about it."""
    from decomposable.training import methods

    path = job.folder.path / "curve.png"
    if path.exists() and path.stat().st_mtime_ns >= job.folder.record.stat().st_mtime_ns:
        return f"The figure is {path}"
    method, epochs = job.settings.method, job.settings.epochs
    label = methods.find(method).label or method
    names = dict.fromkeys(row.curve for row in rows)
    curves = {name or label: [row for row in rows if row.curve == name] for name in names}
    start = "from trained weights" if job.init else "from scratch"
    trained = f"{epochs} epoch{'' if epochs == 1 else 's'} {start}, seed {job.settings.seed}"
    message = f"{label}: {trained}; no size is retrained"
    measured = "perplexity" if networks.has_perplexity(rows) else "accuracy"
    title = f"{job.recipe}: {measured} over size"
    return networks.draw_sizes(path, curves, title=title, message=message, again=" with --resume")


def _as_typed(value: Any) -> Any:
    """Return a setting as `--set` takes it."""
    return ",".join(v if isinstance(v, str) else f"{v:g}" for v in value) if isinstance(value, tuple) else value


VERB = Verb(
    name="train",
    summary="train a network of any size: a ready recipe, or your own model and data",
    description=(
        "Train a model once so that it works at every size, then decompose it, compute batch normalisation statistics\n"
        "for a grid of sizes and measure the accuracy at some of them. RUN then holds\n"
        "  network.safetensors  the network at every size (see: decomposable sizes, evaluate, resize)\n"
        "  metrics.jsonl        what was seen on the way, line by line\n"
        "  record.json          settings, seed, commit, machine, sizes and accuracies\n"
        "  curve.png            accuracy over size\n"
        "A run that was cut off goes on with --resume, and ends with the same bits as one that was not.\n"
        "Started by torchrun, several processes share it: torchrun --nproc-per-node 4 -m decomposable train …\n\n"
        + arguments.RECIPES
    ),
    example=(
        "decomposable train digits --out runs/digits\n"
        "  decomposable train cifar10-resnet20 --data DIR --init resnet20.pt --set epochs=10 refresh=8 --out runs/cifar"
    ),
    add_options=_options,
    run=_run,
    if_interrupted="the same command with --resume goes on from the last checkpoint",
)
