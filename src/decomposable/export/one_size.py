"""One size of a network as one file: `export_onnx` and `export_torch`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from decomposable import __version__
from decomposable.core.tracing import Forward
from decomposable.export.checking import (
    Run,
    Trials,
    as_numpy,
    check_tolerance,
    largest_difference,
    onnx_runner,
    require_close,
    rounding,
    torch_runner,
    trials_of,
)
from decomposable.export.graph import require_onnx, to_onnx
from decomposable.export.interface import Feeds, Interface, check_batch, interface_of
from decomposable.export.program import ExportError, output_names, tensors_of, to_program
from decomposable.export.quiet import quiet, reason, refusing
from decomposable.export.report import ExportReport
from decomposable.export.source import ExportSource, subject_of
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.files import replacing, write_atomically
from decomposable_edge.sizing.plans import RankPlan, SizeKeywords, SizeRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OTHERS = ("example_input", "forward", "dynamic", "tolerance")  # the keywords besides those of a size


def export_onnx(
    net: nn.Module,
    path: str | os.PathLike[str],
    *,
    example_input: Any = None,
    forward: Forward | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    tolerance: float = 1e-4,
    **size: Unpack[SizeKeywords],
) -> ExportReport:
    """Write one size of a network as an ONNX file, after ONNX Runtime has given the same numbers as PyTorch.

    The file is one of its own, of the network in eval mode, with batch normalisation folded where it can be. It has
    every input that the network was called with: as the batch's dict calls it, or else the parameter of the model's
    ``forward``; and "input" where that is the first entry of a batch. Its output is called "output", or output_0,
    output_1 and on, or as in the dict that the model returns; what `forward` makes of that is not in the file.

    It is tried with the example batch itself, with batches of other sizes and lengths, and with rows that differ from
    the example in every input.

    Args:
        net: a network of `decompose` or `load`, which stays at its size, or any module.
        path: the file, .onnx; replaced at once, or left as it was where anything fails.
        example_input: a batch, where the network does not know what it takes. It is also what the file is tried with.
        forward: ``forward(net, batch)``, how a batch like the example input is used; by default as in `decompose`.
        dynamic: axes that vary besides the batch, as in ``{"input_ids": {1: "length"}}``; those of one name are of one
            length.
        tolerance: the largest difference from PyTorch that is allowed, as a part of the largest output (at least 1).
        macs, params, ratio, ranks, latency_ms, align: the size, as in ``net.resize_``; by default the current one.
        batch: the only batch size, where the model or the device needs a fixed one; by default it takes any.

    Example:
        >>> import decomposable as dn, tempfile, torch
        >>> net = dn.decompose(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_onnx(net, f"{folder}/small.onnx", macs=0.5)
        >>> report.macs <= 40, report.largest_difference < 1e-4, report.outputs
        (True, True, ('output',))
    """
    target = check_ending(path, ".onnx")
    request = SizeRequest.of("export_onnx", size, *_OTHERS)
    tolerance, batch = check_tolerance(tolerance), check_batch(request.batch)
    require_onnx()
    subject = subject_of(net, request, example_input, forward, runtime="onnxruntime")
    interface = interface_of(subject.call, dynamic, batch)
    model, interface = to_onnx(subject.module, interface, optimize=True, rows=subject.rows)
    trials = trials_of(subject.module, interface, subject.rows)
    found = largest_difference(torch_runner(subject.module, subject.call), onnx_runner(model), trials.all)
    if found > tolerance:
        require_close(found, tolerance, rounding(subject.module, subject.call, trials.all))
    for key, value in _description(subject).items():
        model.metadata_props.add(key=key, value=value)
    content = model.SerializeToString()
    write_atomically(target, content)
    return ExportReport(
        **reported(subject, interface, trials),
        path=target,
        format="onnx",
        bytes=len(content),
        outputs=tuple(output.name for output in model.graph.output),
        largest_difference=found,
    )


def export_torch(
    net: nn.Module,
    path: str | os.PathLike[str],
    *,
    example_input: Any = None,
    forward: Forward | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    tolerance: float = 1e-4,
    **size: Unpack[SizeKeywords],
) -> ExportReport:
    """Write one size of a network as a `.pt2` file, which ``torch.export.load(path).module()`` runs without its code.

    The arguments are those of `export_onnx`. The file is read again and compared with the network before it gets its
    name. It is of the network in eval mode; its weights can be trained no further. Inputs that have names of their own
    are given by name, as in ``module(input_ids=ids, attention_mask=mask)``.
    """
    target = check_ending(path, ".pt2")
    request = SizeRequest.of("export_torch", size, *_OTHERS)
    tolerance, batch = check_tolerance(tolerance), check_batch(request.batch)
    subject = subject_of(net, request, example_input, forward, runtime="torch")
    interface = interface_of(subject.call, dynamic, batch)
    outputs = output_names(subject.module, interface, interface.rows(subject.rows, batch or 1))
    program, interface = to_program(subject.module, interface, subject.rows)
    program = _without_traces(program)
    trials = trials_of(subject.module, interface, subject.rows)
    with replacing(target) as unfinished:
        try:
            with quiet(), unfinished.open("wb") as file:
                torch.export.save(program, file, extra_files=_description(subject))
        except OSError:
            raise
        except Exception as error:  # in whatever words it refuses a program
            raise ExportError(f"export: torch.export cannot save the model ({reason(error)})") from error
        reference = torch_runner(subject.module, subject.call)
        found = largest_difference(reference, _runner(unfinished, interface), trials.all)
        require_close(found, tolerance)
        written = unfinished.stat().st_size
    return ExportReport(
        **reported(subject, interface, trials),
        path=target,
        format="torch-export",
        bytes=written,
        outputs=outputs,
        largest_difference=found,
    )


def check_ending(path: str | os.PathLike[str], ending: str) -> Path:
    """The path, where its ending says what will be in the file and its folder is there."""
    target = Path(path)
    if target.suffix != ending:
        raise InvalidArgumentError(f"path {target}: got the ending {target.suffix!r}; allowed: {ending}")
    if not target.parent.is_dir():
        raise InvalidArgumentError(f"path {target}: there is no folder {target.parent}; allowed: one that exists")
    if target.is_dir():
        raise InvalidArgumentError(f"path {target}: it is a folder; allowed: the name of a file")
    return target


def reported(size: ExportSource | RankPlan, interface: Interface, trials: Trials) -> dict[str, Any]:
    """What a report says of a size, of the inputs, and of what they were tried with."""
    return {
        **_counts(size),
        "inputs": {name: interface.call.inputs[name] for name in interface.names},
        "left_out": interface.left_out,
        "unvaried": trials.unvaried,
        "batches": trials.counts,
        "axes": {name: dict(interface.axes[name]) for name in interface.names if name in interface.axes},
        "lengths": dict(trials.lengths),
    }


def _counts(size: ExportSource | RankPlan) -> dict[str, Any]:
    counts = {name: getattr(size, name) for name in ("macs", "params", "full_macs", "full_params")}
    return counts | {"ranks": None if size.ranks is None else dict(size.ranks)}


def _description(subject: ExportSource) -> dict[str, str]:
    """What a file says of its size, for whoever looks into it."""
    facts = {name: json.dumps(value) for name, value in _counts(subject).items() if value is not None}
    return {f"decomposable.{name}": text for name, text in {"version": __version__, **facts}.items()}


def _without_traces(program: ExportedProgram) -> ExportedProgram:
    """The program without the stack traces of its nodes, which hold the paths of source files."""
    for module in program.graph_module.modules():  # the branches of a condition are modules of their own
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def _runner(path: Path, interface: Interface) -> Run:
    """What was written, read again."""
    with refusing(ExportError, "export: what was written cannot be read again"), quiet(), path.open("rb") as file:
        module = torch.export.load(file).module()

    @torch.no_grad()
    def run_module(batch: Feeds) -> list[Any]:
        inputs = {name: batch[name] for name in interface.names}
        with refusing(ExportError, "export: what was written cannot run the batch"):
            returned = module(*inputs.values()) if interface.call.is_default else module(**inputs)
        return [as_numpy(y) for y in tensors_of(returned)]

    return run_module
