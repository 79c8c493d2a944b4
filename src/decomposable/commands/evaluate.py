"""`decomposable evaluate`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from decomposable.commands import arguments, networks
from decomposable.progress import Progress, ProgressLine, Tracker, progress_line
from decomposable_edge.console import Verb, answer, parse_sizes, rounding, showing_warnings
from decomposable_edge.errors import InvalidArgumentError

if TYPE_CHECKING:
    from decomposable.network.file.contents import Artifact
    from decomposable.training.evaluation import Row
    from decomposable_edge.sizing.plans import RankPlan
    from decomposable_edge.sizing.ranks import Measure

DEFAULT = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1)


def _options(parser: argparse.ArgumentParser) -> None:
    arguments.add(parser, "file", "--data")
    usual = ",".join(f"{size:g}" for size in DEFAULT)
    parser.add_argument("--sizes", metavar="LIST", help=f"MAC budgets, as in 1,0.5,25%%,10M (default: {usual})")
    parser.add_argument("--params", metavar="LIST", help="parameter budgets in place of MAC budgets")
    arguments.add(parser, "--align", type=rounding, help=arguments.ALIGN)
    arguments.add(parser, "--recipe", "--device", "--workers")


def _run(options: argparse.Namespace) -> None:
    from decomposable_edge.sizing.rounding import check_align, described

    with showing_warnings("decomposable evaluate"), progress_line(options) as line:
        line(Progress("", "reading the network"))  # at once: importing PyTorch takes a while
        rows, images = _measured(options, line)
    sizes = [{"asked": asked, **row.as_dict()} for asked, row in rows]
    align = check_align(options.align)
    content = {"file": str(options.file), "test_images": images, "align": align, "sizes": sizes}
    rounded = "" if align == "auto" else f"; {described(align)}"
    answer(options, content, networks.table(rows), f"\n{images:,} test images, no retraining{rounded}")


def _measured(options: argparse.Namespace, line: ProgressLine) -> tuple[list[tuple[str, Row]], int]:
    """Return for every size what was asked for and what came of it; and how many test images there are."""
    from decomposable.network import artifact
    from decomposable.training.devices import choose_device
    from decomposable.training.evaluation import Row, judged

    device = choose_device(options.device)
    contents = artifact.outline(options.file)
    plans = _plans(contents, options)  # what is impossible is refused before any work
    task, _ = networks.find_task(contents.info, options.recipe, options.data)
    net = networks.loaded(options.file, task.build_model, only=True).to(device)
    data = task.load_data()
    rows: list[tuple[str, Row]] = []
    tracker = Tracker(line, "measuring", total=len(plans), unit="sizes")
    for asked, size, plan in plans:
        tracker.update(len(rows), f"now {asked}")
        net.resize_(plan)
        found = judged(net, data, workers=options.workers)
        rows.append((asked, Row.of(size, plan, found.accuracy, perplexity=found.perplexity)))
    return rows, data.test_count


def sizes_asked(options: argparse.Namespace) -> tuple[Measure | None, list[tuple[str, float]]]:
    """Return the measure and the sizes that were typed; none where no size was."""
    if options.sizes is not None and options.params is not None:
        raise InvalidArgumentError("--sizes and --params: got both; allowed: one of them")
    if options.params is not None:
        return "params", parse_sizes("--params", options.params)
    return None, [] if options.sizes is None else parse_sizes("--sizes", options.sizes)


def _plans(contents: Artifact, options: argparse.Namespace) -> list[tuple[str, float, RankPlan]]:
    """Return what was asked for, as text and as a number, and its plan."""
    from decomposable_edge.sizing.rounding import check_align

    selector, (measure, wanted) = contents.selector, sizes_asked(options)
    if not wanted:
        align = check_align(options.align)
        least = selector.smallest_cost(selector.measure, align) / selector.full_cost(selector.measure)
        wanted = [(f"{size:g}", size) for size in DEFAULT if size >= least]
    return [(asked, size, contents.of_size(size, measure or selector.measure, options.align)) for asked, size in wanted]


VERB = Verb(
    name="evaluate",
    summary="measure the accuracy of a network at any sizes",
    description="Measure the test accuracy of a network file at a list of sizes, without retraining.",
    example=(
        "decomposable evaluate runs/digits/network.safetensors --sizes 1,0.5,25%\n"
        "  decomposable evaluate runs/cifar/network.safetensors --data DIR --params 1,0.1"
    ),
    add_options=_options,
    run=_run,
)
