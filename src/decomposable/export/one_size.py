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
    as_numpy,
    check_tolerance,
    largest_difference,
    onnx_runner,
    reported,
    require_close,
    rounding,
    torch_runner,
    trials_of,
)
from decomposable.export.graph import require_onnx, to_onnx
from decomposable.export.interface import Feeds, Interface, check_batch, interface_of
from decomposable.export.program import ExportError, output_names, tensors_of, to_program
from decomposable.export.quiet import quiet, refusing
from decomposable.export.report import ExportReport
from decomposable.export.source import ExportSource, check_ending, subject_of
from decomposable_edge.files import replacing, write_atomically
from decomposable_edge.sizing.plans import SizeKeywords, SizeRequest

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

    The file is of the network in eval mode; batch normalisation is folded where it can be. Inputs are called as in the
    batch's dict, or as the parameters of the model's ``forward``; the first entry of a batch is "input". Outputs are
    called as in the dict that the model returns, else "output", or output_0, output_1 and on. What `forward` makes of
    them is not in the file.

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
    source = subject_of(net, request, example_input, forward, runtime="onnxruntime")
    interface = interface_of(source.call, dynamic, batch)
    model, interface = to_onnx(source.module, interface, optimize=True, rows=source.rows)
    trials = trials_of(source.module, interface, source.rows)
    found = largest_difference(torch_runner(source.module, source.call), onnx_runner(model), trials.all)
    if found > tolerance:
        require_close(found, tolerance, rounding(source.module, source.call, trials.all))
    for key, value in _description(source).items():
        model.metadata_props.add(key=key, value=value)
    content = model.SerializeToString()
    write_atomically(target, content)
    outputs = tuple(output.name for output in model.graph.output)
    facts = reported(source.counts, interface, trials, found)
    return ExportReport(**facts, path=target, format="onnx", bytes=len(content), outputs=outputs)


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
    source = subject_of(net, request, example_input, forward, runtime="torch")
    interface = interface_of(source.call, dynamic, batch)
    outputs = output_names(source.module, interface, interface.rows(source.rows, batch or 1))
    program, interface = to_program(source.module, interface, source.rows)
    _drop_traces(program)
    trials = trials_of(source.module, interface, source.rows)
    with replacing(target) as unfinished:
        refused = refusing(ExportError, "export: torch.export cannot save the model", but=OSError)
        with refused, quiet(), unfinished.open("wb") as file:
            torch.export.save(program, file, extra_files=_description(source))
        reference = torch_runner(source.module, source.call)
        found = largest_difference(reference, _runner(unfinished, interface), trials.all)
        require_close(found, tolerance)
        written = unfinished.stat().st_size
    facts = reported(source.counts, interface, trials, found)
    return ExportReport(**facts, path=target, format="torch-export", bytes=written, outputs=outputs)


def _description(source: ExportSource) -> dict[str, str]:
    """Return what a file says of its size, for whoever looks into it."""
    facts = {name: json.dumps(value) for name, value in vars(source.counts).items() if value is not None}
    return {f"decomposable.{name}": text for name, text in {"version": __version__, **facts}.items()}


def _drop_traces(program: ExportedProgram) -> None:
    """Take out the stack traces of nodes, which hold the paths of source files."""
    for module in program.graph_module.modules():  # the branches of a condition are modules of their own
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop("stack_trace", None)


def _runner(path: Path, interface: Interface) -> Run:
    """Return what was written, read again, as a function of a batch."""
    with refusing(ExportError, "export: what was written cannot be read again"), quiet(), path.open("rb") as file:
        module = torch.export.load(file).module()

    @torch.no_grad()
    def run_module(batch: Feeds) -> list[Any]:
        inputs = {name: batch[name] for name in interface.names}
        with refusing(ExportError, "export: what was written cannot run the batch"):
            returned = module(*inputs.values()) if interface.call.is_default else module(**inputs)
        return [as_numpy(y) for y in tensors_of(returned)]

    return run_module
