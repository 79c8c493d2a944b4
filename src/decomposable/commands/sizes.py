"""`decomposable sizes`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decomposable.commands import networks
from decomposable.commands.verb import ProgressLine, Verb, as_table
from decomposable.errors import DecomposableError, InvalidArgumentError

if TYPE_CHECKING:
    from decomposable.artifact import Artifact
    from decomposable.data.base import Data
    from decomposable.network import DecomposedNet
    from decomposable.ranks import RankPlan

SHOWN = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)
SEARCH_STEPS = 6


class NotMeasuredError(DecomposableError):
    """A file has no accuracies."""


def _options(parser: argparse.ArgumentParser) -> None:
    networks.add_file(parser)
    parser.add_argument(
        "--accuracy-drop",
        metavar="POINTS",
        type=float,
        help="show only the smallest size that loses at most this many points against the largest one",
    )
    parser.add_argument(
        "--data", metavar="DIR", type=Path, help="with --accuracy-drop: measure between the sizes that the file knows"
    )
    networks.add_recipe(parser)


def _run(options: argparse.Namespace) -> None:
    from decomposable import artifact

    if options.accuracy_drop is not None and not 0 <= options.accuracy_drop <= 100:
        raise InvalidArgumentError(f"--accuracy-drop {options.accuracy_drop:g}; allowed: points from 0 to 100")
    contents = artifact.read(options.file)
    rows = _rows(contents)
    if options.accuracy_drop is not None:
        rows = [_smallest(options, contents, rows)]
    if options.json:
        keys = ("size", "macs", "params", "macs_fraction", "params_fraction", "ranks", "accuracy")
        print(json.dumps({"file": str(options.file), "sizes": [{k: row[k] for k in keys} for row in rows]}))
        return
    print(as_table(networks.HEADER, [networks.cells(f"{r['size']:g}", r["plan"], r["accuracy"]) for r in rows]))
    if options.accuracy_drop is None:
        print(_closing(contents))


def _rows(contents: Artifact) -> list[dict[str, Any]]:
    """The sizes whose accuracy was measured; where there are none, a list of usual ones; and the smallest possible."""
    measured = measured_sizes(contents.info)
    selector = contents.selector
    sizes = [size for size in (measured or SHOWN) if size >= selector.smallest_size]
    by_ranks = {}  # a file that was resized has the same largest size for many budgets: the smallest of them counts
    for size in sizes:
        plan = selector.of_size(size)
        by_ranks[plan.ranks] = _row(size, plan, measured.get(size))
    smallest = selector.smallest_plan()
    by_ranks.setdefault(smallest.ranks, _row(round(selector.smallest_size, 4), smallest, None))
    return list(by_ranks.values())


def _row(size: float, plan: RankPlan, accuracy: float | None) -> dict[str, Any]:
    return {
        "size": size,
        "macs": plan.macs,
        "params": plan.params,
        "macs_fraction": plan.macs_fraction,
        "params_fraction": plan.params_fraction,
        "ranks": [min(plan.ranks.values()), max(plan.ranks.values())],
        "accuracy": accuracy,
        "plan": plan,
    }


def measured_sizes(info: Mapping[str, Any]) -> dict[float, float]:
    """The accuracies in a file, by size, largest first; what is not one is passed over."""
    rows = info.get("sizes")
    found = {}
    for row in rows if isinstance(rows, list) else ():
        size, accuracy = (row.get("size"), row.get("accuracy")) if isinstance(row, Mapping) else (None, None)
        if isinstance(size, int | float) and isinstance(accuracy, int | float) and 0 < size <= 1:
            found[float(size)] = float(accuracy)
    return dict(sorted(found.items(), reverse=True))


def _smallest(options: argparse.Namespace, contents: Artifact, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The smallest size within the drop, among those measured or, with data, between two of them."""
    measured = [row for row in rows if row["accuracy"] is not None]
    if not measured and options.data is None and not _has_own_data(contents):
        raise NotMeasuredError(f"{options.file} has no accuracies; --data DIR measures them here")
    if options.data is None and measured:
        lowest = measured[0]["accuracy"] - options.accuracy_drop - 1e-9
        return min((row for row in measured if row["accuracy"] >= lowest), key=lambda row: float(row["size"]))
    return _searched(options, contents)


def _has_own_data(contents: Artifact) -> bool:
    return contents.info.get("recipe") == "digits"


def _searched(options: argparse.Namespace, contents: Artifact) -> dict[str, Any]:
    """Halve the interval between a size that is good enough and a smaller one that is not."""
    from decomposable.loading import load

    task = networks.find_task(contents.info, options.recipe, options.data)
    net = load(options.file, model=task.build_model())
    data = task.load_data()
    progress = ProgressLine()
    try:
        rows = _bisected(contents, net, data, options.accuracy_drop, progress)
    finally:
        progress.close()
    return min(rows, key=lambda row: float(row["size"]))


def _bisected(
    contents: Artifact, net: DecomposedNet, data: Data, drop: float, progress: ProgressLine
) -> list[dict[str, Any]]:
    from decomposable.evaluation import accuracy

    selector = contents.selector

    def measured(size: float) -> dict[str, Any]:
        progress(f"measuring sizes: {size:.4f}")
        return _row(size, net.set_plan_(selector.of_size(size)), accuracy(net, data))

    good = [measured(1.0)]
    lowest = good[0]["accuracy"] - drop - 1e-9
    low, high = selector.smallest_size, 1.0
    for size in [s for s in SHOWN if low < s < 1]:  # coarse first: accuracy need not fall evenly
        row = measured(size)
        if row["accuracy"] < lowest:
            low = size
            break
        good.append(row)
        high = size
    for _ in range(SEARCH_STEPS):
        row = measured(round((low + high) / 2, 4))
        if row["accuracy"] >= lowest:
            good.append(row)
            high = row["size"]
        else:
            low = row["size"]
    return good


def _closing(contents: Artifact) -> str:
    count = len(contents.statistics.plans) if contents.statistics is not None else 0
    statistics = f"batch normalisation statistics for {count} sizes" if count else "no batch normalisation statistics"
    recipe = contents.info.get("recipe")
    trained = f"; trained with {recipe}" if isinstance(recipe, str) else ""
    layers = f"{len(contents.selector.costs)} layers decomposed"
    return f"\nAny size between the first and the last can be taken. {layers}; {statistics}{trained}."


VERB = Verb(
    name="sizes",
    summary="what sizes a network file holds, and which one is accurate enough",
    description=(
        "List sizes of a network file: MACs, parameters, the range of the ranks, the accuracy where it was measured.\n"
        "--accuracy-drop takes the smallest that is accurate enough: of those measured or, with --data, of any."
    ),
    example=(
        "decomposable sizes runs/cifar/network.safetensors\n"
        "  decomposable sizes runs/cifar/network.safetensors --accuracy-drop 1.0"
    ),
    add_options=_options,
    run=_run,
)
