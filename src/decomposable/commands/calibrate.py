"""`decomposable calibrate`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from decomposable.commands import arguments, networks
from decomposable.progress import Progress, ProgressLine, Report, progress_line
from decomposable_edge.console import Verb, answer, rounding, showing_warnings
from decomposable_edge.errors import DecomposableError, InvalidArgumentError, SettingError
from decomposable_edge.text import first_line

if TYPE_CHECKING:
    from decomposable.network.calibration.statistics import CalibrationReport, Statistics
    from decomposable.network.decomposed import DecomposedNet
    from decomposable.recipes import Task
    from decomposable.recipes.settings import Settings
    from decomposable_edge.sizing.ranks import RankSelector


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add(parser, "file", "--data")
    sizes = (
        "MAC budgets, as in 1,0.5,25%%, added to the sizes that FILE has (default: a grid of all sizes, in place of "
        "those; with --align, added to them)"
    )
    add("--sizes", metavar="LIST", help=sizes)
    align = "for ranks rounded to multiples of 8, 16 … (default: auto, which serves for unrounded ranks, too)"
    arguments.add(parser, "--align", type=rounding, help=align)
    add("--images", metavar="N", type=int, help="training images (default: as many as its training had)")
    add("--passes", metavar="N", type=float, help="of the full network over the images: the most that a grid may cost")
    add("--seed", metavar="N", type=int, help="of which images, and how augmented (default: its own)")
    add("-o", "--out", metavar="OUT", type=Path, help="the file to write (default: FILE itself)")
    arguments.add(parser, "--force", "--recipe", "--device")


def _run(options: argparse.Namespace) -> None:
    with showing_warnings("decomposable calibrate"), progress_line(options) as line:
        line(Progress("", "reading the network"))  # at once: importing PyTorch takes a while
        made = _made(options, line)
    _show(options, made)


class _Made(NamedTuple):
    out: Path
    net: DecomposedNet
    report: CalibrationReport
    images: int
    dropped: int  # accuracies that were measured with other statistics


def _made(options: argparse.Namespace, line: ProgressLine) -> _Made:
    """Calibrate and write the file."""
    from decomposable.network import artifact
    from decomposable.network.calibration.statistics import tracked_batch_norms
    from decomposable.training.devices import choose_device

    out = options.file if options.out is None else arguments.checked_out(options, [".safetensors"])
    device = choose_device(options.device)
    contents = artifact.outline(options.file)
    sizes = arguments.sizes_listed(options)
    for size in sizes or ():
        contents.selector.of_size(size, align=options.align)  # which has to be possible
    task, settings = networks.find_task(contents.info, options.recipe, options.data)
    settings = _asked(settings, options)
    net = networks.loaded(options.file, task.build_model)
    if not tracked_batch_norms(net):
        raise InvalidArgumentError(f"{options.file}: it has no batch normalisation; allowed: a network with some")
    net = net.to(device)
    before = net.artifact().statistics
    report, images = _calibrated(net, task, settings, sizes, options.align, line)
    line(Progress("writing the file"))
    info, dropped = _still_so(net, before)
    net.save(out, info, onnx=None if net.graph is not None else False)  # with a graph for devices if it had one
    return _Made(out, net, report, images, dropped)


def _asked(settings: Settings, options: argparse.Namespace) -> Settings:
    """Return the settings of the file's training, with what was asked for besides."""
    from decomposable.training.methods.flat import with_overrides

    given = {
        "calibration_images": ("--images", options.images),
        "calibration_passes": ("--passes", options.passes),
        "seed": ("--seed", options.seed),
    }
    for name, (option, value) in given.items():
        if value is not None:
            try:
                settings = with_overrides(settings, {name: value})
            except SettingError as error:
                raise InvalidArgumentError(f"{option} {error.value}; allowed: {error.allowed}") from error
    return settings


def _calibrated(
    net: DecomposedNet, task: Task, settings: Settings, sizes: list[float] | None, align: Any, progress: Report
) -> tuple[CalibrationReport, int]:
    """Calibrate with the first images of an epoch, as at the end of a training; return how many, too."""
    from decomposable.training.evaluation import WrongDataError
    from decomposable.training.finishing import calibration_data_for

    progress(Progress("reading the data"))
    batches = calibration_data_for(task.load_data(), settings, task.loss, progress).calibration
    x, _ = next(iter(batches))
    try:
        net.extract()(x.to(next(net.parameters()).device))
    except Exception as error:  # whatever a model of somebody else raises
        shape = tuple(x.shape)
        raise WrongDataError(f"the network cannot run a batch of shape {shape}: {first_line(error)}") from error
    report = net.calibrate_(batches, sizes, align=align, passes=settings.calibration_passes, progress=progress)
    return report, report.batches * len(x)


def _still_so(net: DecomposedNet, before: Statistics | None) -> tuple[dict[str, Any], int]:
    """Return what the file says of itself, and how many accuracies are left out: those of other statistics."""
    after, rows = net.artifact().statistics, net.info.get("sizes")
    if not isinstance(rows, list) or not rows:
        return dict(net.info), 0
    kept = [row for row in rows if _has_same_statistics(row, net.selector, before, after)]
    return {**net.info, "sizes": kept}, len(rows) - len(kept)


def _has_same_statistics(
    row: object, selector: RankSelector, before: Statistics | None, after: Statistics | None
) -> bool:
    """Return whether a measured size runs exactly as it did."""
    size = row.get("size") if isinstance(row, Mapping) else None
    try:
        plan = selector.of_size(size)  # type: ignore[arg-type]
    except DecomposableError:
        return False
    old, new = (None if each is None else each.at(plan) for each in (before, after))
    if old is None or new is None:
        return plan.is_full and old is new
    return all(bool((a == b).all()) for name in new for a, b in zip(old[name], new[name], strict=True))


def _show(options: argparse.Namespace, made: _Made) -> None:
    from decomposable_edge.sizing.rounding import check_align, described

    out, net, report, images, dropped = made
    align, statistics = check_align(options.align), net.artifact().statistics
    assert statistics is not None
    told = {name: getattr(report, name) for name in ("sizes", "batches", "seconds", "passes", "is_settled")}
    content = {
        "file": str(options.file),
        "out": str(out),
        "align": align,
        **told,
        "images": images,
        "calibrated_sizes": len(statistics.plans),
        "calibrated_alignments": list(statistics.alignments),
        "accuracies_dropped": dropped,
    }
    batches = f"{report.batches} batch{'es' if report.batches > 1 else ''}"
    seen = f"{images:,} images in {batches}, {report.seconds:.1f} s"
    lines = [f"{report.sizes} sizes calibrated, {described(align)}: {seen}"]
    if not report.is_settled:
        lines.append(f"stopped at {report.passes:.3g} passes: statistics between some sizes are less exact (--passes)")
    ranks = ("rounded by auto or not at all" if each == 1 else f"multiples of {each}" for each in statistics.alignments)
    lines.append(f"{out}: written; it has statistics for {len(statistics.plans)} sizes; ranks: {', '.join(ranks)}")
    if dropped:
        left_out = f"accuracies left out, because they were measured with other statistics: {dropped}"
        lines.append(f"{left_out}; measure anew with: decomposable evaluate {out}")
    answer(options, content, *lines)


VERB = Verb(
    name="calibrate",
    summary="compute the batch normalisation statistics of a network's sizes",
    description=(
        "Compute batch normalisation statistics for sizes of a network file from training images, augmented as in its\n"
        "training, and write them into the file: for a grid of all sizes, for chosen ones, or for rounded ranks."
    ),
    example=(
        "decomposable calibrate runs/digits/network.safetensors --align 8\n"
        "  decomposable calibrate runs/cifar/network.safetensors --data DIR --sizes 0.25,0.2 -o better.safetensors"
    ),
    add_options=_options,
    run=_run,
)
