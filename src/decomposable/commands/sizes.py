"""`decomposable sizes`."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from decomposable.commands import arguments, networks
from decomposable.progress import Tracker, progress_line
from decomposable_edge.console import Verb, answer
from decomposable_edge.errors import DecomposableError, InvalidArgumentError
from decomposable_edge.notes import measured_sizes, recipe_in
from decomposable_edge.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from decomposable.network.file.contents import Artifact
    from decomposable.training.evaluation import Row

USUAL = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)
SEARCH_STEPS = 6


class NotMeasuredError(DecomposableError):
    """A file has no accuracies."""


def _options(parser: argparse.ArgumentParser) -> None:
    arguments.add(parser, "file")
    drop = "show only the smallest size that loses at most this many points against the largest one"
    parser.add_argument("--accuracy-drop", metavar="POINTS", type=float, help=drop)
    here = "with --accuracy-drop: measure here, also between the sizes that the file knows"
    arguments.add(parser, "--data", help=f"{here} (where the data needs no folder, --recipe does that)")
    arguments.add(parser, "--recipe", "--device", "--workers")


def _run(options: argparse.Namespace) -> None:
    from decomposable.network import artifact

    drop = options.accuracy_drop
    if drop is not None and not 0 <= drop <= 100:
        raise InvalidArgumentError(f"--accuracy-drop {drop:g}; allowed: points from 0 to 100")
    if drop is None and (options.data is not None or options.recipe is not None):
        raise InvalidArgumentError(
            "--data and --recipe are for --accuracy-drop; to measure sizes: decomposable evaluate"
        )
    contents = artifact.outline(options.file)
    rows = _rows(contents, measured_sizes(contents.info))
    networks.warn_of("sizes", networks.first_complaint(contents, [row.size for row in rows]))
    if drop is not None:
        rows = [_smallest(options, contents, rows)]
    content = {"file": str(options.file), "sizes": [row.as_dict() for row in rows]}
    table = networks.table([(f"{row.size:g}", row) for row in rows])
    answer(options, content, table, _closing(contents) if drop is None else None)


def _rows(contents: Artifact, measured: Mapping[float, float]) -> list[Row]:
    """Return the sizes whose accuracy was measured, or else usual ones; and the smallest possible."""
    from decomposable.training.evaluation import Row

    selector = contents.selector
    by_ranks = {}  # a file that was resized has the same largest size for many budgets: the smallest of them counts
    for size in measured or USUAL:
        if size >= selector.smallest_size:
            plan = contents.of_size(size)
            by_ranks[plan.ranks] = Row.of(size, plan, measured.get(size))
    smallest = selector.smallest_plan()
    by_ranks.setdefault(smallest.ranks, Row.of(round(selector.smallest_size, 4), smallest, None))
    return list(by_ranks.values())


def _smallest(options: argparse.Namespace, contents: Artifact, rows: list[Row]) -> Row:
    """Return the smallest size within the drop: of those measured or, with data, of any."""
    from decomposable.training.devices import choose_device
    from decomposable.training.evaluation import Row, accuracy, smallest_within

    if options.data is None and options.recipe is None and (found := smallest_within(rows, options.accuracy_drop)):
        return found
    if options.data is None and networks.needs_data(contents.info, options.recipe):
        has = "" if options.recipe else f"{options.file} has no accuracies; "
        raise NotMeasuredError(f"{has}--data DIR is needed to measure them here")
    device = choose_device(options.device)
    task, _ = networks.find_task(contents.info, options.recipe, options.data)
    net = networks.loaded(options.file, task.build_model, only=True).to(device)
    data = task.load_data()
    with progress_line(options) as line:
        tracker, numbers = Tracker(line, "measuring", total=len(USUAL) + SEARCH_STEPS, unit="sizes"), itertools.count()

        def measure(size: float) -> Row:
            tracker.update(next(numbers), f"now {size:.4g}")
            plan = contents.of_size(size)
            return Row.of(size, plan, accuracy(net.extract(plan), data, workers=options.workers))

        return search(measure, contents.selector.smallest_size, options.accuracy_drop)


def search(measure: Callable[[float], Row], smallest: float, drop: float) -> Row:
    """Measure the usual sizes, then halve the interval below the smallest good one.

    All of the usual ones, because accuracy need not fall evenly: below a size that is not good, one may be.
    """
    from decomposable.training.evaluation import smallest_within

    rows = [measure(size) for size in USUAL if size >= smallest]
    good = smallest_within(rows, drop)
    assert good is not None
    low = max((row.size for row in rows if row.size < good.size), default=smallest)
    for _ in range(SEARCH_STEPS):
        rows.append(measure(round((low + good.size) / 2, 6)))
        before, good = good, smallest_within(rows, drop) or good
        low = rows[-1].size if good is before else low
    return good


def _closing(contents: Artifact) -> str:
    count = len(contents.statistics.plans) if contents.statistics is not None else 0
    statistics = f"batch normalisation statistics of {count} calibrated sizes" if count else "no calibrated sizes"
    recipe = recipe_in(contents.info)
    how = "cut with the recipe" if isinstance(contents.info.get("cut"), Mapping) else "trained with"
    trained = f"; {how} {one_line(recipe, 80)}" if recipe is not None else ""
    layers = f"{len(contents.selector.costs)} layers decomposed"
    measure = contents.selector.measure
    parts, unit = contents.selector.largest_left_alone(measure), "MACs" if measure == "macs" else "parameters"
    left_alone = f" Left alone: {parts} of the {unit}." if parts else ""
    return f"\nAny size between the first and the last can be taken. {layers}; {statistics}{trained}.{left_alone}"


VERB = Verb(
    name="sizes",
    summary="what sizes a network file holds, and which one is accurate enough",
    description=(
        "List sizes of a network file: MACs, parameters, the range of the ranks, the accuracy where it was measured.\n"
        "--accuracy-drop takes the smallest that is accurate enough: of those measured or, with --data, of any."
    ),
    example=(
        "decomposable sizes runs/digits/network.safetensors\n"
        "  decomposable sizes runs/digits/network.safetensors --accuracy-drop 1.0"
    ),
    add_options=_options,
    run=_run,
)
