"""`decomposable evaluate`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from decomposable.commands import networks
from decomposable.commands.verb import ProgressLine, Verb, as_table, parse_sizes

if TYPE_CHECKING:
    from decomposable.ranks import Measure

DEFAULT = "1,0.75,0.5,0.35,0.25,0.15,0.1"


def _options(parser: argparse.ArgumentParser) -> None:
    networks.add_file(parser)
    parser.add_argument("--data", metavar="DIR", type=Path, help="where the data set is (digits needs none)")
    parser.add_argument("--sizes", metavar="LIST", help=f"MAC budgets, as in 1,0.5,25%%,10M (default: {DEFAULT})")
    parser.add_argument("--params", metavar="LIST", help="parameter budgets in place of MAC budgets")
    networks.add_recipe(parser)
    parser.add_argument("--device", metavar="NAME", default="auto", help="auto, cpu, cuda … (default: auto)")
    parser.add_argument("--workers", metavar="N", type=int, default=0, help="processes that read data (default: 0)")


def _run(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from decomposable import artifact
    from decomposable.errors import InvalidArgumentError
    from decomposable.evaluation import Row, accuracy
    from decomposable.experiment import choose_device
    from decomposable.loading import load

    if options.sizes is not None and options.params is not None:
        raise InvalidArgumentError("--sizes and --params: got both; allowed: one of them")
    device = choose_device(options.device)
    measure: Measure = "macs" if options.params is None else "params"
    text = options.params or options.sizes or DEFAULT
    sizes = parse_sizes("--params" if measure == "params" else "--sizes", text)
    contents = artifact.read(options.file)
    plans = [contents.selector.of_size(size, measure) for size in sizes]  # an impossible one is refused here
    task = networks.find_task(contents.info, options.recipe, options.data)
    net = load(options.file, model=task.build_model())
    net.to(device)
    data = task.load_data()
    rows = []
    progress = ProgressLine()
    try:
        for typed, plan in zip(text.split(","), plans, strict=True):
            progress(f"measuring sizes: {typed.strip()}")
            net.set_plan_(plan)
            rows.append((typed.strip(), plan, accuracy(net, data, workers=options.workers)))
    finally:
        progress.close()
    if options.json:
        lines = [
            {"asked": typed, **asdict(Row.of(size, plan, points))}
            for (typed, plan, points), size in zip(rows, sizes, strict=True)
        ]
        print(json.dumps({"file": str(options.file), "test_images": data.test_count, "sizes": lines}))
        return
    print(as_table(networks.HEADER, [networks.cells(*row) for row in rows]))
    print(f"\n{data.test_count:,} test images, no retraining")


VERB = Verb(
    name="evaluate",
    summary="measure the accuracy of a network at any sizes",
    description="Measure the test accuracy of a network file at a list of sizes, without retraining.",
    example="decomposable evaluate runs/cifar/network.safetensors --data DIR --sizes 1,0.5,25%",
    add_options=_options,
    run=_run,
)
