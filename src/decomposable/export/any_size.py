"""The any-size ONNX: one file that a device without PyTorch resizes, by `decomposable.edge.AnySizeSession`.

    net ── every layer as two factors with all bases ── ONNX graph ── tidy ── description, arrays, checksum ──▶ file
                                                                                                     │
                                              PyTorch at several sizes ◀── compared before it is there

The graph is that of the network with pairs in place of all decomposed layers, so that padding, strides and shared
weights are exported as PyTorch runs them. What a size changes (factors, batch normalisation) stays as it is; all else
is simplified.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from decomposable.errors import ArtifactError, InvalidArgumentError
from decomposable.export.any_size_graph import in_pairs, tidy, to_keep, to_rename
from decomposable.export.checking import as_numpy, check_tolerance, largest_difference, require_close
from decomposable.export.graph import MOST_BYTES, require_onnx, to_onnx
from decomposable.export.onnx_file import check_ending
from decomposable.export.program import ExportError, FixedBatchError
from decomposable.export.quiet import reason
from decomposable.export.report import ExportReport
from decomposable.export.subject import input_of, rows_of, samples
from decomposable.files import replacing
from decomposable.interpolation import position
from decomposable.network import DecomposedNet
from decomposable.parts import InputSpec
from decomposable.ranks import RankPlan, RankSelector
from decomposable.storage.container import as_json
from decomposable.storage.contents import Artifact
from decomposable.storage.fields import left_alone_records

if TYPE_CHECKING:
    import onnx

_DOC = "Runs at full size in any ONNX runtime, and at any size with decomposable.edge.AnySizeSession."
_CHECKED, _TRUNCATED = (0.75, 0.5, 0.25), 0.9
_BATCHES = (3, 1)


@dataclass(frozen=True, kw_only=True)
class AnySizeReport(ExportReport):
    """What was written; `sizes` are the parts of the original at which it was compared with PyTorch."""

    sizes: tuple[float, ...]

    def _tried(self) -> str:
        return f"at {', '.join(f'{size:.3g}' for size in dict.fromkeys(self.sizes))} of the original"


@torch.inference_mode(False)
@torch.no_grad()
def export_any_size(
    net: nn.Module, path: str | os.PathLike[str], *, example_input: Any = None, tolerance: float = 1e-4
) -> AnySizeReport:
    """Write one ONNX file that `decomposable.edge.AnySizeSession` runs at any size, on a device without PyTorch.

    The file is opened and compared with the network in PyTorch at the full size, the smallest one and some in between
    before it takes its place; where they differ too much, the export is refused and nothing is written.

    Args:
        net: a decomposed network, calibrated or not. It stays as it is, and so does its size in force.
        path: the file, .onnx.
        example_input: a batch, where the network was decomposed without one. It is also what the file is tried with.
        tolerance: the largest difference from PyTorch that is allowed, as a part of the largest output (at least 1).
    """
    target = check_ending(path, ".onnx")
    tolerance = check_tolerance(tolerance)
    require_onnx()
    if not isinstance(net, DecomposedNet):
        raise InvalidArgumentError(
            f"export_any_size: got a {type(net).__name__}; allowed: a network of decompose() or load()"
        )
    _check_types(net)
    spec = _input_of(net, example_input)
    if net._statistics is None:
        net.warn_if_not_calibrated(net.selector.smallest_plan(), stacklevel=5)  # the line that called for the export
    twin = copy.deepcopy(net).cpu().eval()
    artifact = twin.artifact()
    model = tidy(_traced(twin, spec), to_rename(twin, artifact), to_keep(twin))
    model.doc_string = _DOC
    content = _sealed(model, artifact, lacks_statistics=bool(twin._norms) and artifact.statistics is None)
    rows = rows_of(example_input)
    with replacing(target) as unfinished:
        unfinished.write_bytes(content)
        sizes, difference = _compare(twin, unfinished, [samples(spec, rows, n) for n in _BATCHES], tolerance)
    outputs = tuple(value.name for value in model.graph.output)
    return _report(twin.selector.full_plan(), target, len(content), spec, outputs, sizes, difference)


def _traced(net: DecomposedNet, spec: InputSpec) -> onnx.ModelProto:
    try:
        return to_onnx(in_pairs(net), spec, optimize=False)
    except FixedBatchError as error:
        raise ExportError(
            f"export_any_size: the model's code fixes the size of the batch ({reason(error)}); allowed: one that runs "
            "any batch (export_onnx and export_torch take batch=1 or another number)"
        ) from error


def _report(
    full: RankPlan,
    path: Path,
    count: int,
    spec: InputSpec,
    outputs: tuple[str, ...],
    sizes: tuple[float, ...],
    difference: float,
) -> AnySizeReport:
    return AnySizeReport(
        path=path,
        format="any-size",
        macs=full.macs,
        params=full.params,
        full_macs=full.full_macs,
        full_params=full.full_params,
        ranks=dict(full.ranks),
        bytes=count,
        input=spec,
        outputs=outputs,
        batches=_BATCHES,
        largest_difference=difference,
        sizes=sizes,
    )


def _check_types(net: DecomposedNet) -> None:
    for name, parameter in net.named_parameters():
        if parameter.dtype not in (torch.float16, torch.float32, torch.float64):
            raise ExportError(
                f"export_any_size: '{name}' is {parameter.dtype}, which ONNX Runtime's CPU does not run; allowed: "
                "float32, float64 and float16"
            )


def _input_of(net: DecomposedNet, example_input: Any) -> InputSpec:
    """What the network takes, which has to be of the size that its MACs were counted at: the file tells them."""
    spec = input_of(net.input, example_input)
    if net.input is not None and spec.shape != net.input.shape:
        raise InvalidArgumentError(
            f"export_any_size: example_input has samples of shape {spec.shape}, and the network's MACs were counted at "
            f"{net.input.shape}; allowed: that shape, or a network of decompose() with that example_input"
        )
    return spec


def _sealed(model: onnx.ModelProto, artifact: Artifact, *, lacks_statistics: bool) -> bytes:
    """The file's content, with all that choosing and setting a size depends on."""
    import onnx

    from decomposable.edge.container import seal

    selector, statistics = artifact.selector, artifact.statistics
    description = {
        "kind": "any-size",
        "layers": _layer_records(model, artifact),
        "fixed_macs": selector.fixed_macs,
        "fixed_params": selector.fixed_params,
        "left_alone": left_alone_records(selector.left_alone),
        "feeders": dict(artifact.feeders),
        "statistics": None,
        "lacks_statistics": lacks_statistics,
        "info": as_json("info", artifact.info),
    }
    arrays: dict[str, Any] = {"scores": np.concatenate(selector.scores)}
    arrays |= {"limits/lower": selector.lower, "limits/upper": selector.upper}
    if statistics is not None:
        description["statistics"] = {
            "names": list(statistics.names),
            "channels": list(statistics.channels),
            "has_explicit_full": statistics.has_explicit_full,
            "alignments": list(statistics.alignments),
        }
        arrays |= _statistics_arrays(artifact)
    content = seal(model, description, arrays)
    if len(content) > MOST_BYTES:
        raise ExportError(f"export_any_size: it has {len(content):,} bytes; allowed: {MOST_BYTES:,} in one ONNX file")
    try:
        onnx.checker.check_model(content, full_check=False)
    except Exception as error:  # kinds of its own
        raise ExportError(f"export_any_size: the model has no valid ONNX form ({reason(error)})") from error
    return content


def _layer_records(model: onnx.ModelProto, artifact: Artifact) -> list[dict[str, Any]]:
    """What is to be known of every layer; of those that only training uses, which the graph has not, the bases."""
    from decomposable.edge.graph import first_of

    present, records = {tensor.name for tensor in model.graph.initializer}, []
    for layer, cost in zip(artifact.skeleton.layers, artifact.selector.costs, strict=True):
        record: dict[str, Any] = {"name": layer.name, "form": layer.form, "shape": list(layer.shape)}
        record |= {"dense_macs": cost.dense_macs, "macs_per_rank": cost.macs_per_rank}
        if first_of(layer.name) not in present:
            record["stored"] = len(artifact.factors[layer.name].first)
        records.append(record)
    return records


def _statistics_arrays(artifact: Artifact) -> dict[str, Any]:
    statistics, names = artifact.statistics, [layer.name for layer in artifact.skeleton.layers]
    assert statistics is not None
    plans = (*statistics.plans, statistics.full_plan)  # the last row is the end of every interpolation
    mean, var = statistics.original
    return {
        "statistics/ranks": np.array([[plan.ranks[name] for name in names] for plan in plans], np.int64),
        "statistics/dense": np.array([[name in plan.dense for name in names] for plan in plans], bool),
        "statistics/positions": np.array(statistics.positions, np.float64),
        "statistics/mean": statistics.mean_SC.numpy(),
        "statistics/var": statistics.var_SC.numpy(),
        "original/mean": mean.numpy(),
        "original/var": var.numpy(),
    }


def _compare(
    net: DecomposedNet, path: Path, batches: Sequence[Tensor], tolerance: float
) -> tuple[tuple[float, ...], float]:
    """The sizes at which the file was compared with PyTorch, and the largest difference; raise if it is too large."""
    from decomposable.edge import AnySizeSession

    def candidate(batch: Tensor) -> list[Any]:
        found = session.run(as_numpy(batch))
        return found if isinstance(found, list) else [found]

    try:
        threads = min(torch.get_num_threads(), os.cpu_count() or 1)
        session = AnySizeSession(path, threads=threads, keep=1)
        sizes, largest = [], 0.0
        for plan in _plans(net.selector):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # whoever exports is told of statistics by the network
                session.set_plan(plan)
            net.set_plan_(plan)
            sizes.append(position(plan))
            largest = max(largest, largest_difference(net, candidate, batches))
            require_close(largest, tolerance)
    except ArtifactError as error:  # it names a file that nobody will see
        raise ExportError(f"export_any_size: {str(error).removeprefix(f'{path}: ')}; nothing was written") from error
    return tuple(sizes), largest


def _plans(selector: RankSelector) -> list[RankPlan]:
    """The sizes to compare: the ends, some in between, and one that has truncated layers run densely."""
    plans = [selector.full_plan(), selector.choose(ratio=_TRUNCATED)]
    plans += [selector.of_size(size) for size in _CHECKED if size >= selector.smallest_size]
    plans.append(selector.smallest_plan())
    return list({plan.ranks: plan for plan in plans}.values())
