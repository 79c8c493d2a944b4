"""One size of a network as a `torch.export` program: `export_torch`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from decomposable.core.tracing import Forward
from decomposable.export.checking import (
    Run,
    as_numpy,
    check_tolerance,
    largest_difference,
    require_close,
    torch_runner,
)
from decomposable.export.interface import Feeds, Interface, check_batch, interface_of
from decomposable.export.onnx_file import check_ending, description, reported
from decomposable.export.program import ExportError, output_names, tensors_of, to_program
from decomposable.export.quiet import quiet, reason
from decomposable.export.report import ExportReport
from decomposable.export.subject import subject_of
from decomposable.export.trials import trials_of
from decomposable.files import replacing
from decomposable.sizing.plans import SizeRequest


def export_torch(
    net: nn.Module,
    path: str | os.PathLike[str],
    *,
    macs: float | None = None,
    params: float | None = None,
    ratio: float | None = None,
    ranks: Mapping[str, int] | None = None,
    latency_ms: float | None = None,
    align: int | Literal["auto", "measured"] | None = None,
    batch: int | None = None,
    example_input: Any = None,
    forward: Forward | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    tolerance: float = 1e-4,
) -> ExportReport:
    """Write one size of a network as a `.pt2` file, which ``torch.export.load(path).module()`` runs without its code.

    The arguments are those of `export_onnx`. The file is read again and compared with the network before it gets its
    name. It is of the network in eval mode; its weights can be trained no further. Inputs that have names of their own
    are given by name, as in ``module(input_ids=ids, attention_mask=mask)``.
    """
    target = check_ending(path, ".pt2")
    tolerance, batch = check_tolerance(tolerance), check_batch(batch)
    request = SizeRequest(
        macs=macs, params=params, ratio=ratio, ranks=ranks, latency_ms=latency_ms, align=align, batch=batch
    )
    subject = subject_of(net, request, example_input, forward, runtime="torch")
    interface = interface_of(subject.call, dynamic, batch)
    outputs = output_names(subject.module, interface, interface.rows(subject.rows, batch or 1))
    program, interface = to_program(subject.module, interface, subject.rows)
    program = _without_traces(program)
    trials = trials_of(subject.module, interface, subject.rows)
    with replacing(target) as unfinished:
        try:
            with quiet(), unfinished.open("wb") as file:
                torch.export.save(program, file, extra_files=description(subject))
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


def _without_traces(program: ExportedProgram) -> ExportedProgram:
    """The program without the stack traces of its nodes, which hold the paths of source files."""
    for module in program.graph_module.modules():  # the branches of a condition are modules of their own
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def _runner(path: Path, interface: Interface) -> Run:
    """What was written, read again."""
    try:
        with quiet(), path.open("rb") as file:
            module = torch.export.load(file).module()
    except Exception as error:
        raise ExportError(f"export: what was written cannot be read again ({reason(error)})") from error

    @torch.no_grad()
    def run_module(batch: Feeds) -> list[Any]:
        inputs = {name: batch[name] for name in interface.names}
        try:
            returned = module(*inputs.values()) if interface.call.is_default else module(**inputs)
        except Exception as error:
            raise ExportError(f"export: what was written cannot run the batch ({reason(error)})") from error
        return [as_numpy(y) for y in tensors_of(returned)]

    return run_module
