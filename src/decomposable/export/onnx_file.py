"""One size of a network as one ONNX file: `export_onnx`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from decomposable import __version__
from decomposable.core.tracing import Forward
from decomposable.errors import InvalidArgumentError
from decomposable.export.checking import (
    check_tolerance,
    largest_difference,
    onnx_runner,
    require_close,
    rounding,
    torch_runner,
)
from decomposable.export.graph import require_onnx, to_onnx
from decomposable.export.interface import Interface, check_batch, interface_of
from decomposable.export.report import ExportReport
from decomposable.export.subject import Subject, subject_of
from decomposable.export.trials import Trials, trials_of
from decomposable.files import write_atomically
from decomposable.sizing.plans import RankPlan, SizeRequest

if TYPE_CHECKING:
    import onnx


def export_onnx(
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
        macs, params, ratio, ranks, latency_ms, align: the size, as in ``net.resize_``; by default the one in force.
        batch: the only batch size, where the model or the device needs a fixed one; by default it takes any.
        example_input: a batch, where the network does not know what it takes. It is also what the file is tried with.
        forward: ``forward(net, batch)``, how a batch like the example input is used; by default as in `decompose`.
        dynamic: axes that vary besides the batch, as in ``{"input_ids": {1: "length"}}``; those of one name are of one
            length.
        tolerance: the largest difference from PyTorch that is allowed, as a part of the largest output (at least 1).

    Example:
        >>> import decomposable as dn, tempfile, torch
        >>> net = dn.decompose(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_onnx(net, f"{folder}/small.onnx", macs=0.5)
        >>> report.macs <= 40, report.largest_difference < 1e-4, report.outputs
        (True, True, ('output',))
    """
    target = check_ending(path, ".onnx")
    tolerance, batch = check_tolerance(tolerance), check_batch(batch)
    require_onnx()
    request = SizeRequest(
        macs=macs, params=params, ratio=ratio, ranks=ranks, latency_ms=latency_ms, align=align, batch=batch
    )
    subject = subject_of(net, request, example_input, forward, runtime="onnxruntime")
    interface = interface_of(subject.call, dynamic, batch)
    model, interface = to_onnx(subject.module, interface, optimize=True, rows=subject.rows)
    trials = trials_of(subject.module, interface, subject.rows)
    found = largest_difference(torch_runner(subject.module, subject.call), onnx_runner(model), trials.all)
    if found > tolerance:
        require_close(found, tolerance, rounding(subject.module, subject.call, trials.all))
    _describe_(model, subject)
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


def reported(size: Subject | RankPlan, interface: Interface, trials: Trials) -> dict[str, Any]:
    """What a report says of a size, of the inputs, and of what they were tried with."""
    return {
        "macs": size.macs,
        "params": size.params,
        "full_macs": size.full_macs,
        "full_params": size.full_params,
        "ranks": None if size.ranks is None else dict(size.ranks),
        "inputs": {name: interface.call.inputs[name] for name in interface.names},
        "left_out": interface.left_out,
        "unvaried": trials.unvaried,
        "batches": trials.counts,
        "axes": {name: dict(interface.axes[name]) for name in interface.names if name in interface.axes},
        "lengths": dict(trials.lengths),
    }


def description(subject: Subject) -> dict[str, str]:
    """What a file says of its size, for whoever looks into it."""
    facts = {
        "version": __version__,
        "macs": subject.macs,
        "params": subject.params,
        "full_macs": subject.full_macs,
        "full_params": subject.full_params,
        "ranks": None if subject.ranks is None else dict(subject.ranks),
    }
    return {f"decomposable.{key}": _as_text(value) for key, value in facts.items() if value is not None}


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _describe_(model: onnx.ModelProto, subject: Subject) -> None:
    for key, value in description(subject).items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
