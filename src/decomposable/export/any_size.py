"""The graph in a network's file, with which `decomposable_edge.AnySizeSession` runs it on a device without PyTorch.

    net ── every layer as a chain with all bases ── ONNX graph ── tidy ── without its weights ──▶ file
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from decomposable.core.tracing import Forward
from decomposable.export.any_size_graph import in_chains, names_of, tidy, without_weights
from decomposable.export.checking import (
    Trials,
    as_numpy,
    check_tolerance,
    largest_difference,
    require_close,
    torch_runner,
    trials_of,
)
from decomposable.export.graph import require_onnx, to_onnx
from decomposable.export.interface import Feeds, Interface, interface_of
from decomposable.export.one_size import check_ending, reported
from decomposable.export.program import ExportError, FixedBatchError, ready
from decomposable.export.quiet import reason, refusing
from decomposable.export.report import ExportReport
from decomposable.export.source import known_of, same_shapes, taken_by
from decomposable.export.stages import COMPARING, SIMPLIFYING, Stages
from decomposable.network.calls import INPUT, CallSignature
from decomposable.network.capture import Captured
from decomposable.network.decomposed import DecomposedNet
from decomposable.progress import Report, shown
from decomposable_edge.device_graph import DeviceGraph
from decomposable_edge.errors import ArtifactError, DecomposableError, InvalidArgumentError
from decomposable_edge.files import replacing
from decomposable_edge.sizing.interpolation import position
from decomposable_edge.sizing.plans import RankPlan, SizeRequest
from decomposable_edge.sizing.ranks import RankSelector

if TYPE_CHECKING:
    import onnx

    from decomposable_edge import AnySizeSession

_CHECKED, _TRUNCATED = (0.75, 0.5, 0.25), 0.9
_BATCHES = (1, 3)
_TOLERANCE = 1e-4


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
    """Write the one file of a network, as ``net.save(path, onnx=True)`` does, and tell how its graph was made.

    `decomposable_edge.AnySizeSession` runs it at any size on a device without PyTorch, and `load` loads it. It is
    opened and compared with the network in PyTorch at the full size, the smallest one and some in between before it
    takes its place; where they differ too much, the export is refused and nothing is written. Inputs and outputs are
    called as by `export_onnx`; the session takes a dict of arrays, or one array where there is one input.

    Args:
        net: a decomposed network, calibrated or not. It stays as it is, and so does its current size.
        path: the file, .safetensors.
        example_input, forward, dynamic, tolerance: as in `export_onnx`.
        progress: called with lines about how far it is, such as `print`; by default a terminal shows one.
    """
    target = check_ending(path, ".safetensors")
    if not isinstance(net, DecomposedNet):
        raise InvalidArgumentError(
            f"export_any_size: got a {type(net).__name__}; allowed: a network of decompose() or load()"
        )
    tolerance = check_tolerance(tolerance)
    found, interface = _prepared(net, example_input, forward, dynamic)
    if net._statistics is None:
        net._warn_once(net._with_warning(net.selector.smallest_plan()), stacklevel=5)  # the line that called for it
    return _written(net, target, None, found.rows, interface, tolerance, progress)


@torch.inference_mode(False)
@torch.no_grad()
def save_for_devices(net: DecomposedNet, path: str | os.PathLike[str], info: Mapping[str, Any] | None) -> int:
    """Write the one file of a network, with its graph, and return its size; raise where it cannot have one.

    A graph that is known already, because the network was saved or loaded with it, is taken if it still gives what
    PyTorch gives: it depends on how the network is wired, and not on its weights.
    """
    found, interface = _prepared(net, None, None, None)
    artifact, target = net.artifact(), Path(path)
    if artifact.graph is not None:
        with suppress(DecomposableError), replacing(target) as unfinished:
            size = artifact.save(unfinished, info)
            _check_known(copy.deepcopy(net).cpu().eval(), unfinished, interface, found.rows)
            return size
    return _written(net, target, info, found.rows, interface, _TOLERANCE, None).bytes


def _prepared(
    net: DecomposedNet, example_input: Any, forward: Forward | None, dynamic: Mapping[str, Mapping[int, str]] | None
) -> tuple[Captured, Interface]:
    """How the network is called, and what the file takes; what cannot be exported is refused."""
    require_onnx()
    _check_types(net)
    found = _taken(net, example_input, forward)
    assert found.call is not None
    return found, interface_of(found.call, dynamic, None)


def _written(
    net: DecomposedNet,
    target: Path,
    info: Mapping[str, Any] | None,
    rows: Feeds | None,
    interface: Interface,
    tolerance: float,
    progress: Report | None,
) -> AnySizeReport:
    """The file with a graph that is made now, and which the network knows from now on."""
    import onnx

    artifact, twin = net.artifact(), copy.deepcopy(net).cpu().eval()
    with shown(progress) as report:
        stages = Stages(report)
        model, interface = _traced(twin, interface, rows, stages)
        stages.begin(SIMPLIFYING)
        names = names_of(twin)
        model = tidy(model, names)
        with refusing(ExportError, "export: the model has no valid ONNX form"):
            onnx.checker.check_model(model, full_check=False)
        values = {name: interface.call.inputs[name].values for name in interface.names}
        graph = DeviceGraph(content=without_weights(model, names), lengths=interface.lengths, values=values)
        trials = trials_of(twin, interface, rows, _BATCHES)
        with replacing(target) as unfinished:
            size = replace(artifact, graph=graph).save(unfinished, info)
            sizes, difference = _compare(twin, unfinished, interface, trials, tolerance, stages)
    net.graph = graph
    return AnySizeReport(
        **reported(twin.selector.full_plan(), interface, trials),
        path=target,
        format="any-size",
        bytes=size,
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
            f"export: the model's code fixes the size of the batch ({reason(error)}); allowed: one that runs "
            "any batch (export_onnx and export_torch take batch=1 or another number)"
        ) from error


def _check_types(net: DecomposedNet) -> None:
    for name, parameter in net.named_parameters():
        if parameter.dtype not in (torch.float16, torch.float32, torch.float64):
            raise ExportError(
                f"export: '{name}' is {parameter.dtype}, which ONNX Runtime's CPU does not run; allowed: "
                "float32, float64 and float16"
            )


def _taken(net: DecomposedNet, example_input: Any, forward: Forward | None) -> Captured:
    """How the network is called; its inputs have to be as when its MACs were counted: the file tells them."""
    known = known_of(net)
    found = taken_by(ready(net._current.module), known, example_input, forward, net._forward)
    if known.call is not None and found.call is not None and not same_shapes(known.call, found.call):
        raise InvalidArgumentError(
            f"export: example_input has samples of {_shapes(found.call)}, and the network's MACs were counted "
            f"at {_shapes(known.call)}; allowed: those shapes, or a network of decompose() with that example_input"
        )
    return found


def _shapes(call: CallSignature) -> str:
    if call.is_default:
        return f"shape {call.inputs[INPUT].shape}"
    return " and ".join(f"shape {spec.shape} for '{name}'" for name, spec in call.inputs.items())


def _compare(
    net: DecomposedNet, path: Path, interface: Interface, trials: Trials, tolerance: float, stages: Stages
) -> tuple[tuple[float, ...], float]:
    """The sizes at which the file was compared with PyTorch, and the largest difference; raise if it is too large."""
    plans, largest = _plans(net.selector), 0.0
    sizes: list[float] = []
    with _session(path) as session:
        for plan in plans:
            stages.begin(COMPARING, len(sizes) / len(plans), f"{len(sizes)} of {len(plans)} sizes")
            sizes.append(position(plan))
            largest = max(largest, _difference(net, session, plan, interface, _tried_at(plan, plans, trials)))
            require_close(largest, tolerance)
    return tuple(sizes), largest


def _check_known(net: DecomposedNet, path: Path, interface: Interface, rows: Feeds | None) -> None:
    """Raise where a file whose graph was made before does not give what PyTorch gives, at both ends of the sizes."""
    with _session(path) as session:
        left_out = tuple(name for name in interface.names if name not in {port.name for port in session.inputs})
        interface = replace(interface, left_out=left_out)
        for plan in (net.selector.full_plan(), net.selector.smallest_plan()):
            batch = interface.rows(rows, max(_BATCHES))
            require_close(_difference(net, session, plan, interface, (batch,)), _TOLERANCE)


@contextmanager
def _session(path: Path) -> Iterator[AnySizeSession]:
    """A file that nobody else has seen, opened as a device would."""
    from decomposable_edge import AnySizeSession

    try:
        yield AnySizeSession(path, threads=min(torch.get_num_threads(), os.cpu_count() or 1), keep=1)
    except ArtifactError as error:  # it names a file that nobody will see
        raise ExportError(f"export: {error.reason or error}; nothing was written") from error


def _difference(
    net: DecomposedNet, session: AnySizeSession, plan: RankPlan, interface: Interface, batches: Sequence[Feeds]
) -> float:
    """How far a session is from PyTorch at a size."""

    def candidate(batch: Feeds) -> list[Any]:
        found = session.run({name: as_numpy(batch[name]) for name in interface.names})
        return found if isinstance(found, list) else [found]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever exports is told of statistics by the network
        session.resize(plan)
        net.resize_(plan)
    return largest_difference(torch_runner(net, interface.call), candidate, batches)


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
