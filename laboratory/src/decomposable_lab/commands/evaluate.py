"""`decomposable-lab evaluate`: as `decomposable evaluate`, also of a network of the laboratory."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from decomposable.commands import evaluate, networks
from decomposable.network.file.container import open_container
from decomposable.progress import Progress, ProgressLine, Tracker, progress_line
from decomposable.training.devices import choose_device
from decomposable.training.evaluation import Row, judged
from decomposable_edge.console import answer, showing_warnings
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.methods.loading import load
from decomposable_lab.methods.sized import KIND, MethodSize, SizedNet


def _run(options: argparse.Namespace) -> None:
    with open_container(options.file) as container:
        description = container.description
    if description.get("kind") != KIND:
        evaluate.VERB.run(options)
        return
    with showing_warnings("decomposable-lab evaluate"), progress_line(options) as line:
        line(Progress("", "reading the network"))
        rows, images = _measured(options, description, line)
    sizes = [{"asked": asked, **row.as_dict()} for asked, row in rows]
    content = {"file": str(options.file), "test_images": images, "align": None, "sizes": sizes}
    answer(options, content, networks.table(rows), f"\n{images:,} test images, no retraining")


def _measured(
    options: argparse.Namespace, description: Mapping[str, Any], line: ProgressLine
) -> tuple[list[tuple[str, Row]], int]:
    """Return what was asked for and what came out of it, for every size; and how many test images there are."""
    device = choose_device(options.device)
    task, _ = networks.find_task(networks.info_in(description), options.recipe, options.data)
    net = load(options.file, model=task.build_model()).to(device)
    plans = _plans(net, options)
    data = task.load_data()
    rows: list[tuple[str, Row]] = []
    tracker = Tracker(line, "measuring", total=len(plans), unit="sizes")
    for asked, size, plan in plans:
        tracker.update(len(rows), f"now {asked}")
        net.resize_(plan)
        found = judged(net, data, workers=options.workers)
        rows.append((asked, Row.of(size, plan, found.accuracy, perplexity=found.perplexity)))
    return rows, data.test_count


def _plans(net: SizedNet, options: argparse.Namespace) -> list[tuple[str, float, MethodSize]]:
    """Return all sizes, or the largest within each budget that was asked for."""
    if options.align is not None:
        raise InvalidArgumentError(f"--align: not for a network of the method {net.method}; allowed: no --align")
    measure, wanted = evaluate.sizes_asked(options)
    if not wanted:
        return [(size.name, size.macs_fraction, size) for size in net.sizes]
    return [(asked, size, net.plan(**{measure or "macs": size})) for asked, size in wanted]


VERB = replace(
    evaluate.VERB,
    summary="measure the accuracy of a network at its sizes, of any method",
    example="decomposable-lab evaluate runs/us-net/network.safetensors",
    run=_run,
)
