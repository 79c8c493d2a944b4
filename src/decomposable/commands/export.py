"""`decomposable export`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decomposable.commands import arguments, networks
from decomposable.progress import progress_line
from decomposable_edge.console import Verb, answer, showing_warnings
from decomposable_edge.errors import ExampleNeededError, InvalidArgumentError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from decomposable.export.report import ExportReport
    from decomposable.progress import Report
    from decomposable_edge.sizing.plans import RankPlan

ENDINGS = {"onnx": ".onnx", "torch-export": ".pt2"}
_USUAL = (0.75, 0.5, 0.35, 0.25, 0.15, 0.1)  # sizes that a device may take


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add(parser, "file", "--macs", "--params", "--ratio")
    add("--latency-ms", metavar="MS", type=float, help="at most this long here, as decomposable bench measured it")
    arguments.add(parser, "--align", help=arguments.ALIGN + arguments.MEASURED)
    add("--any-size", action="store_true", help="the network file itself, with the graph that decomposable_edge needs")
    what = "the file to write: .onnx or .pt2; .safetensors with --any-size"
    add("-o", "--out", metavar="OUT", type=Path, required=True, help=what)
    add("--format", metavar="FORMAT", choices=ENDINGS, help="onnx or torch-export (default: OUT's)")
    add("--batch", metavar="N", type=int, help="the one batch size that it takes (default: any)")
    axis = "an axis that varies besides the batch, as in input_ids:1=length; may be given several times"
    add("--dynamic", metavar="AXIS", action="append", type=_axis, help=axis)
    add("--input", metavar="SHAPE", help="of one sample, where the file does not know it: 3x32x32, or 128:int64")
    arguments.add(parser, "--recipe")
    built = "package.module:function, which builds the model, where FILE is not of ours"
    add("--model", metavar="FUNCTION", help=built)
    add("--tolerance", metavar="T", type=float, default=1e-4, help="largest difference from PyTorch (default: 1e-4)")
    arguments.add(parser, "--force")


def _axis(text: str) -> tuple[str, int, str]:
    """Return an axis that varies, as it is typed: the input, the place in its shape, and the name."""
    where, _, axis = text.partition("=")
    name, _, at = where.rpartition(":")
    if not (name and axis and at.isascii() and at.isdigit() and len(at) < 4):
        raise argparse.ArgumentTypeError(f"{text:.60}; allowed: an input, a place and a name, as in input_ids:1=length")
    return name, int(at), axis


def _run(options: argparse.Namespace) -> None:
    from decomposable.network.decomposed import DecomposedNet
    from decomposable_edge.sizing.rounding import described

    kind, size = _checked(options)
    plan = None
    with showing_warnings("decomposable export"), progress_line(options) as line:
        line("reading the network")  # at once: importing PyTorch takes a while
        net = networks.open_network(options)
        if size and isinstance(net, DecomposedNet):
            plan = net.plan(**size, runtime="onnxruntime" if kind == "onnx" else "torch", batch=options.batch)
        line("exporting" if kind == "any-size" else "exporting and comparing with PyTorch")
        try:
            report = _exported(options, kind, net, size, line)
        except ExampleNeededError as error:
            raise InvalidArgumentError(
                f"--input is needed: {options.file} does not say what the network takes; allowed: the shape of one "
                "sample, as in --input 3x32x32"
            ) from error
    taken = ", ".join(f"{name}={value}" for name, value in size.items()) or "as it was saved"
    if isinstance(net, DecomposedNet) and kind == "any-size":
        networks.warn_of("export", networks.first_complaint(net.artifact(), _USUAL))
        taken = "all"
    if plan is not None:
        taken += f" ({described(plan.align)})"
        if plan.instead_of is not None:
            taken += f"; the nearest calibrated size below {plan.instead_of:.3f}x, which was not calibrated"
    about: dict[str, Any] = {"path": str(report.path), "input": report.input and asdict(report.input)}
    about |= {"align": plan and plan.align, "instead_of": plan and plan.instead_of}
    hint = _hint(options, net, plan) if plan is not None and kind == "onnx" else None
    lines = (f"size: {taken}", str(report), f"run it with: {_how_to_run(report)}", hint)
    answer(options, asdict(report) | about, *lines)


def _checked(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the kind of file that is wanted, and the size as `resize_` takes it, empty for that which was saved.

    Whatever can be seen to be wrong before any work is refused.
    """
    if options.any_size and options.format is not None:
        raise InvalidArgumentError("--any-size writes a file of its own; allowed: no --format")
    kinds = {ending: kind for kind, ending in ENDINGS.items() if options.format in (None, kind)}
    out = arguments.checked_out(options, [".safetensors"] if options.any_size else list(kinds))
    if options.any_size:
        refused = ("macs", "params", "ratio", "latency_ms", "align", "batch")
        if came := _typed(name for name in refused if getattr(options, name) is not None):
            raise InvalidArgumentError(
                f"--any-size holds every size and takes any batch; got {', '.join(came)}; allowed: no size, no --align "
                "and no --batch"
            )
        return "any-size", {}
    size: dict[str, Any] = arguments.sizes_asked(options)
    if options.latency_ms is not None:
        size["latency_ms"] = options.latency_ms
    if len(size) > 1:
        both = " and ".join(_typed(size))
        raise InvalidArgumentError(f"a size is given by one of --macs, --params, --ratio and --latency-ms; got {both}")
    if options.align is not None:
        if not size:
            raise InvalidArgumentError("--align rounds the ranks of a size; allowed: with --macs, --params or another")
        size["align"] = options.align
    return kinds[out.suffix], size


def _typed(names: Iterable[str]) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name in names]


def _exported(
    options: argparse.Namespace, kind: str, net: nn.Module, size: dict[str, Any], progress: Report
) -> ExportReport:
    from decomposable.export.any_size import save_with_graph
    from decomposable.export.one_size import export_onnx, export_torch
    from decomposable.network.decomposed import DecomposedNet

    how: dict[str, Any] = {
        "example_input": _example(options, net),
        "dynamic": _dynamic(options),
        "tolerance": options.tolerance,
    }
    if kind != "any-size":
        export = export_onnx if kind == "onnx" else export_torch
        return export(net, options.out, **size, batch=options.batch, **how)
    if not isinstance(net, DecomposedNet):
        raise InvalidArgumentError(f"--any-size: {options.file} holds one size; allowed: a file of net.save()")
    report = save_with_graph(net, options.out, **how, progress=progress)
    net.warn_of_statistics()
    return report


def _example(options: argparse.Namespace, net: nn.Module) -> Tensor | None:
    """Return a batch of what --input says; a file that knows better is asked."""
    if options.input is None:
        return None
    call = getattr(net, "call", None)
    if call is not None and not call.is_default:
        raise InvalidArgumentError(
            f"--input {options.input:.60}: {options.file} says what the network takes ({', '.join(call.inputs)}); "
            "allowed: no --input"
        )
    return networks.example(options.input, net)


def _dynamic(options: argparse.Namespace) -> dict[str, dict[int, str]] | None:
    found: dict[str, dict[int, str]] = {}
    for name, at, axis in options.dynamic or ():
        if found.setdefault(name, {}).setdefault(at, axis) != axis:
            raise InvalidArgumentError(f"--dynamic: axis {at} of '{name}' has two names; allowed: one")
    return found or None


def _hint(options: argparse.Namespace, net: Any, plan: RankPlan) -> str | None:
    """Return where a coarser rounding may be faster still, and what it needs."""
    from decomposable_edge.sizing.chain import ranks_of

    in_factors = [rank for name in set(plan.ranks) - plan.dense for rank in ranks_of(plan.ranks[name])]
    if plan.align not in (1, "auto") or all(rank % 8 == 0 for rank in in_factors):
        return None
    statistics, needs = net.artifact().statistics, ""
    if statistics is not None and 16 not in statistics.alignments:
        data = " --data DIR" if networks.needs_data(net.info, options.recipe) else ""
        needs = f"; its statistics come from: decomposable calibrate {options.file} --align 16{data}"
    return f"hint: --align 16 rounds every rank, which ONNX Runtime often runs faster{needs}"


def _how_to_run(report: ExportReport) -> str:
    from decomposable.network.calls import INPUT

    path, names = str(report.path), list(report.inputs)
    is_default = names == [INPUT]
    arrays = {name: "x" if is_default else name for name in names}
    feeds = f"{{{', '.join(f'{name!r}: {array}' for name, array in arrays.items())}}}"
    if report.format == "any-size":
        taken = "x" if is_default else feeds
        return f"session = decomposable_edge.AnySizeSession({path!r}); session.resize(macs=0.25); session.run({taken})"
    takes = "; ".join(f"{arrays[name]}: {spec.dtype}, {_shape(report, name)}" for name, spec in report.inputs.items())
    if report.format == "torch-export":
        taken = "x" if is_default else ", ".join(f"{name}={name}" for name in names)
        return f"torch.export.load({path!r}).module()({taken})  # {takes}"
    return f"onnxruntime.InferenceSession({path!r}).run(None, {feeds})  # {takes}"


def _shape(report: ExportReport, name: str) -> str:
    """Return an input's shape, with the names of what varies."""
    varying = {0: "batch" if len(report.batches) > 1 else str(report.batches[0]), **report.axes.get(name, {})}
    sizes = [0, *report.inputs[name].shape]
    return f"({', '.join(varying.get(at, str(size)) for at, size in enumerate(sizes))})"


VERB = Verb(
    name="export",
    summary="write a size of a network for ONNX Runtime or torch.export",
    description=(
        "Write one size of a network file as ONNX (.onnx) or as a program of torch.export (.pt2), compared with\n"
        "PyTorch on the spot; without a size, the one that it was saved at. --any-size writes the network file again,\n"
        "with the graph with which decomposable_edge runs it at any size on a device without PyTorch."
    ),
    example="decomposable export runs/digits/network.safetensors --macs 0.25 -o small.onnx",
    add_options=_options,
    run=_run,
)
