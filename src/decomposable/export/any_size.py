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
from decomposable.export.program import ExportError
from decomposable.export.report import ExportReport
from decomposable.files import replacing
from decomposable.interpolation import position
from decomposable.network import DecomposedNet
from decomposable.parts import InputSpec
from decomposable.ranks import RankPlan, RankSelector
from decomposable.storage.container import as_json
from decomposable.storage.contents import Artifact

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
        path: the file, usually with the ending .onnx.
        example_input: a batch, where the network was decomposed without one.
        tolerance: the largest difference from PyTorch that is allowed, as a part of the largest output (at least 1).
    """
    require_onnx()
    tolerance = check_tolerance(tolerance)
    if not isinstance(net, DecomposedNet):
        raise InvalidArgumentError(
            f"export_any_size: got a {type(net).__name__}; allowed: a network of decompose() or load()"
        )
    _check_types(net)
    spec = _input_of(net, example_input)
    twin = copy.deepcopy(net).cpu().eval()
    artifact = twin.artifact()
    model = tidy(to_onnx(in_pairs(twin), spec, optimize=False), to_rename(twin, artifact), to_keep(twin))
    model.doc_string = _DOC
    content = _sealed(model, artifact)
    with replacing(Path(path)) as unfinished:
        unfinished.write_bytes(content)
        sizes, difference = _compare(twin, unfinished, [spec.example(batch) for batch in _BATCHES], tolerance)
    outputs = tuple(value.name for value in model.graph.output)
    return _report(twin.selector.full_plan(), Path(path), len(content), spec, outputs, sizes, difference)


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
    """What the network takes."""
    spec = InputSpec.of(example_input) if example_input is not None else net.input
    if spec is None:
        raise InvalidArgumentError(
            "export_any_size: what the network takes is not known; allowed: example_input=, a batch of one tensor"
        )
    return spec


def _sealed(model: onnx.ModelProto, artifact: Artifact) -> bytes:
    """The file's content, with all that choosing and setting a size depends on."""
    import onnx

    from decomposable.edge.container import seal

    selector, statistics = artifact.selector, artifact.statistics
    layers = [
        {"name": layer.name, "form": layer.form, "shape": list(layer.shape)}
        | {"dense_macs": cost.dense_macs, "macs_per_rank": cost.macs_per_rank}
        for layer, cost in zip(artifact.skeleton.layers, selector.costs, strict=True)
    ]
    description = {
        "kind": "any-size",
        "layers": layers,
        "fixed_macs": selector.fixed_macs,
        "fixed_params": selector.fixed_params,
        "feeders": dict(artifact.feeders),
        "statistics": None,
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
    onnx.checker.check_model(content, full_check=False)
    return content


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
        session = AnySizeSession(path, ratio=1e-9, threads=torch.get_num_threads(), keep=1)
        sizes, largest = [], 0.0
        for plan in _plans(net.selector):
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
