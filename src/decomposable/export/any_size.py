"""The any-size ONNX: one file that a device without PyTorch resizes, by `decomposable_edge.AnySizeSession`.

    net ── every layer as a chain with all bases ── ONNX graph ── tidy ── description, arrays, checksum ──▶ file
                                                                                                     │
                                              PyTorch at several sizes ◀── compared before it is there

The graph is that of the network with chains in place of all decomposed layers, so that padding, strides and shared
weights are exported as PyTorch runs them. What a size changes (factors, batch normalisation) stays as it is; all else
is simplified.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from decomposable.core.tracing import Forward
from decomposable.export.any_size_graph import in_chains, names_of, tidy
from decomposable.export.checking import (
    Trials,
    as_numpy,
    check_tolerance,
    largest_difference,
    require_close,
    torch_runner,
    trials_of,
)
from decomposable.export.graph import MOST_BYTES, require_onnx, to_onnx
from decomposable.export.interface import Feeds, Interface, interface_of
from decomposable.export.one_size import check_ending, reported
from decomposable.export.program import ExportError, FixedBatchError, ready
from decomposable.export.quiet import reason, refusing
from decomposable.export.report import ExportReport
from decomposable.export.stages import COMPARING, SIMPLIFYING, Stages
from decomposable.export.subject import known_of, same_shapes, taken_by
from decomposable.network.calls import INPUT, Call
from decomposable.network.capture import Captured
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.file.container import as_json
from decomposable.network.file.contents import Artifact
from decomposable.network.parts import kept_ranks
from decomposable.progress import Report, shown
from decomposable_edge.errors import ArtifactError, InvalidArgumentError
from decomposable_edge.files import replacing
from decomposable_edge.sizing.chain import rank_of
from decomposable_edge.sizing.interpolation import position
from decomposable_edge.sizing.plans import RankPlan, SizeRequest
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.record import BUNDLE, describe, layer_entry

if TYPE_CHECKING:
    import onnx

_DOC = "Runs at full size in any ONNX runtime, and at any size with decomposable_edge.AnySizeSession."
_CHECKED, _TRUNCATED = (0.75, 0.5, 0.25), 0.9
_BATCHES = (1, 3)


@dataclass(frozen=True, kw_only=True)
class AnySizeReport(ExportReport):
    """What was written; `sizes` are the parts of the original at which it was compared with PyTorch."""

    sizes: tuple[float, ...]

    def _tried(self) -> str:
        sizes = f"at {', '.join(f'{size:.3g}' for size in dict.fromkeys(self.sizes))} of the original"
        return "; ".join([sizes, *self._lengths()])


@torch.inference_mode(False)
@torch.no_grad()
def export_any_size(
    net: nn.Module,
    path: str | os.PathLike[str],
    *,
    example_input: Any = None,
    forward: Forward | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    tolerance: float = 1e-4,
    progress: Report | None = None,
) -> AnySizeReport:
    """Write one ONNX file that `decomposable_edge.AnySizeSession` runs at any size, on a device without PyTorch.

    The file is opened and compared with the network in PyTorch at the full size, the smallest one and some in between
    before it takes its place; where they differ too much, the export is refused and nothing is written. Inputs and
    outputs are called as by `export_onnx`; the session takes a dict of arrays, or one array where there is one input.

    Args:
        net: a decomposed network, calibrated or not. It stays as it is, and so does its size in force.
        path: the file, .onnx.
        example_input, forward, dynamic, tolerance: as in `export_onnx`.
        progress: called with lines about how far it is, such as `print`; by default a terminal shows one.
    """
    target = check_ending(path, ".onnx")
    tolerance = check_tolerance(tolerance)
    require_onnx()
    if not isinstance(net, DecomposedNet):
        raise InvalidArgumentError(
            f"export_any_size: got a {type(net).__name__}; allowed: a network of decompose() or load()"
        )
    _check_types(net)
    found = _taken(net, example_input, forward)
    assert found.call is not None
    interface = interface_of(found.call, dynamic, None)
    if net._statistics is None:
        net._warn_once(net._with_warning(net.selector.smallest_plan()), stacklevel=5)  # the line that called for it
    twin = copy.deepcopy(net).cpu().eval()
    artifact = twin.artifact()
    with shown(progress) as report:
        stages = Stages(report)
        model, interface = _traced(twin, interface, found.rows, stages)
        stages.begin(SIMPLIFYING)
        model = tidy(model, *names_of(twin, artifact))
        model.doc_string = _DOC
        trials = trials_of(twin, interface, found.rows, _BATCHES)
        lacks_statistics = bool(twin._original.norms) and artifact.statistics is None
        content = _sealed(model, artifact, interface, lacks_statistics=lacks_statistics)
        with replacing(target) as unfinished:
            unfinished.write_bytes(content)
            sizes, difference = _compare(twin, unfinished, interface, trials, tolerance, stages)
    return AnySizeReport(
        **reported(twin.selector.full_plan(), interface, trials),
        path=target,
        format="any-size",
        bytes=len(content),
        outputs=tuple(value.name for value in model.graph.output),
        largest_difference=difference,
        sizes=sizes,
    )


def _traced(
    net: DecomposedNet, interface: Interface, rows: Feeds | None, stages: Stages
) -> tuple[onnx.ModelProto, Interface]:
    try:
        return to_onnx(in_chains(net), interface, optimize=False, rows=rows, begin=stages.begin)
    except FixedBatchError as error:
        raise ExportError(
            f"export_any_size: the model's code fixes the size of the batch ({reason(error)}); allowed: one that runs "
            "any batch (export_onnx and export_torch take batch=1 or another number)"
        ) from error


def _check_types(net: DecomposedNet) -> None:
    for name, parameter in net.named_parameters():
        if parameter.dtype not in (torch.float16, torch.float32, torch.float64):
            raise ExportError(
                f"export_any_size: '{name}' is {parameter.dtype}, which ONNX Runtime's CPU does not run; allowed: "
                "float32, float64 and float16"
            )


def _taken(net: DecomposedNet, example_input: Any, forward: Forward | None) -> Captured:
    """How the network is called; its inputs have to be as when its MACs were counted: the file tells them."""
    known = known_of(net)
    found = taken_by(ready(net._in_force.module), known, example_input, forward, net._forward)
    if known.call is not None and found.call is not None and not same_shapes(known.call, found.call):
        raise InvalidArgumentError(
            f"export_any_size: example_input has samples of {_shapes(found.call)}, and the network's MACs were counted "
            f"at {_shapes(known.call)}; allowed: those shapes, or a network of decompose() with that example_input"
        )
    return found


def _shapes(call: Call) -> str:
    if call.is_default:
        return f"shape {call.inputs[INPUT].shape}"
    return " and ".join(f"shape {spec.shape} for '{name}'" for name, spec in call.inputs.items())


def _sealed(model: onnx.ModelProto, artifact: Artifact, interface: Interface, *, lacks_statistics: bool) -> bytes:
    """The file's content, with all that choosing and setting a size depends on."""
    import onnx

    from decomposable_edge.container import seal
    from decomposable_edge.graph import factor_names

    present = {tensor.name for tensor in model.graph.initializer}
    layers = [layer_entry(*pair) for pair in zip(artifact.skeleton.layers, artifact.selector.costs, strict=True)]
    for layer, record in zip(artifact.skeleton.layers, layers, strict=True):
        if factor_names(layer.name, 1)[0] not in present:  # only training uses it: of its bases, the number
            record["stored"] = rank_of(kept_ranks(artifact.factors[layer.name]))
    tuned = None if artifact.tuned is None else artifact.tuned.of_names(present)  # others are not used
    sizes, arrays = describe(artifact.selector, artifact.feeders, artifact.statistics, BUNDLE, tuned)
    description = {
        "kind": "any-size",
        "layers": layers,
        **sizes,
        "lacks_statistics": lacks_statistics,
        "info": as_json("info", artifact.info),
    }
    if interface.axes:
        description["lengths"] = interface.lengths
    values = {name: list(interface.call.inputs[name].values) for name in interface.names}
    if any(pair != [0, 1] for pair in values.values()):  # what they are where a file does not say it
        description["values"] = values
    plain = {name: array.numpy() if isinstance(array, Tensor) else array for name, array in arrays.items()}
    content = seal(model, description, plain)
    if len(content) > MOST_BYTES:
        raise ExportError(f"export_any_size: it has {len(content):,} bytes; allowed: {MOST_BYTES:,} in one ONNX file")
    with refusing(ExportError, "export_any_size: the model has no valid ONNX form"):
        onnx.checker.check_model(content, full_check=False)
    return content


def _compare(
    net: DecomposedNet, path: Path, interface: Interface, trials: Trials, tolerance: float, stages: Stages
) -> tuple[tuple[float, ...], float]:
    """The sizes at which the file was compared with PyTorch, and the largest difference; raise if it is too large."""
    from decomposable_edge import AnySizeSession

    def candidate(batch: Feeds) -> list[Any]:
        found = session.run({name: as_numpy(batch[name]) for name in interface.names})
        return found if isinstance(found, list) else [found]

    reference = torch_runner(net, interface.call)
    try:
        threads = min(torch.get_num_threads(), os.cpu_count() or 1)
        session = AnySizeSession(path, threads=threads, keep=1)
        plans, largest = _plans(net.selector), 0.0
        sizes: list[float] = []
        for plan in plans:
            stages.begin(COMPARING, len(sizes) / len(plans), f"{len(sizes)} of {len(plans)} sizes")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # whoever exports is told of statistics by the network
                session.resize(plan)
                net.resize_(plan)
            sizes.append(position(plan))
            largest = max(largest, largest_difference(reference, candidate, _tried_at(plan, plans, trials)))
            require_close(largest, tolerance)
    except ArtifactError as error:  # it names a file that nobody will see
        raise ExportError(f"export_any_size: {error.reason or error}; nothing was written") from error
    return tuple(sizes), largest


def _tried_at(plan: RankPlan, plans: Sequence[RankPlan], trials: Trials) -> tuple[Feeds, ...]:
    """Everything at full size, all but the example, which may be large, at the smallest; between them one row.

    There the graph is the same, with other weights: that it takes any batch and length is known from both ends.
    """
    if plan is plans[0]:
        return trials.all
    return trials.batches if plan is plans[-1] else (trials.one_row,)


def _plans(selector: RankSelector) -> list[RankPlan]:
    """The sizes to compare: the ends, some in between, and one that has truncated layers run densely."""
    plans = [selector.full_plan(), selector.plan_for(SizeRequest(ratio=_TRUNCATED))]
    plans += [selector.of_size(size) for size in _CHECKED if size >= selector.smallest_size]
    plans.append(selector.smallest_plan())
    return list({plan.ranks: plan for plan in plans}.values())
