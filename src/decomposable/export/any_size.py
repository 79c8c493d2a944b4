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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decomposable.core.tracing import Forward
from decomposable.export.any_size_graph import in_chains, names_of, tidy, without_weights
from decomposable.export.checking import (
    Trials,
    as_numpy,
    check_tolerance,
    largest_difference,
    reported,
    require_close,
    torch_runner,
    trials_of,
)
from decomposable.export.graph import TRACING, TRANSLATING, require_onnx, to_onnx
from decomposable.export.interface import Feeds, Interface, interface_of
from decomposable.export.program import ExportError, FixedBatchError, ready
from decomposable.export.quiet import reason, refusing
from decomposable.export.report import AnySizeReport, Counts
from decomposable.export.source import check_ending, known_of, same_shapes, taken_by
from decomposable.network.calls import INPUT, CallSignature
from decomposable.network.decomposed import DecomposedNet
from decomposable.progress import Report, Tracker, shown
from decomposable_edge.device_graph import DeviceGraph
from decomposable_edge.errors import ArtifactError, DecomposableError, InvalidArgumentError
from decomposable_edge.files import replacing
from decomposable_edge.sizing.interpolation import position
from decomposable_edge.sizing.plans import RankPlan, SizeRequest
from decomposable_edge.sizing.ranks import RankSelector

if TYPE_CHECKING:
    from decomposable_edge import AnySizeSession

_CHECKED, _TRUNCATED = (0.75, 0.5, 0.25), 0.9
_BATCHES = (1, 3)
_TOLERANCE = 1e-4
SIMPLIFYING, COMPARING = "simplifying the graph", "comparing it with PyTorch"
_SHARES = {TRACING: 0.4, TRANSLATING: 0.4, SIMPLIFYING: 0.05, COMPARING: 0.15}  # of the time: a U-Net, a detector


@torch.inference_mode(False)
@torch.no_grad()
def save_with_graph(
    net: DecomposedNet,
    path: str | os.PathLike[str],
    info: Mapping[str, Any] | None = None,
    *,
    example_input: Any = None,
    forward: Forward | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    tolerance: float = _TOLERANCE,
    progress: Report | None = None,
) -> AnySizeReport:
    """Write the one file of a network with a graph that is made now, and which the network knows from now on.

    The file is opened and compared with the network in PyTorch at the full size, the smallest one and some in between
    before it takes its place. Where they differ too much, nothing is written. The arguments are those of `export_onnx`;
    `progress` is called with lines about how far it is, and by default a terminal shows one.
    """
    import onnx

    target, tolerance = check_ending(path, ".safetensors"), check_tolerance(tolerance)
    interface, rows = _interface(net, example_input, forward, dynamic)
    artifact, twin = net.artifact(), copy.deepcopy(net).cpu().eval()
    with shown(progress) as report:
        stages = _Stages(report)
        try:
            model, interface = to_onnx(in_chains(twin), interface, optimize=False, rows=rows, begin=stages.begin)
        except FixedBatchError as error:
            raise ExportError(
                f"export: the model's code fixes the size of the batch ({reason(error)}); allowed: one that runs "
                "any batch (export_onnx and export_torch take batch=1 or another number)"
            ) from error
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
    facts = reported(Counts.of(twin.selector.full_plan()), interface, trials, difference)
    outputs = tuple(value.name for value in model.graph.output)
    return AnySizeReport(**facts, path=target, format="any-size", bytes=size, outputs=outputs, sizes=sizes)


@torch.inference_mode(False)
@torch.no_grad()
def save_for_devices(
    net: DecomposedNet, path: str | os.PathLike[str], info: Mapping[str, Any] | None, **how: Any
) -> int:
    """Write the one file of a network, with its graph, and return its size; raise where it cannot have one.

    A graph that the network was saved or loaded with is taken where it still gives what PyTorch gives: it depends on
    how the network is wired, and not on its weights. Where `how` says anything of it, it is made anew.
    """
    artifact, target = net.artifact(), Path(path)
    if artifact.graph is not None and not how:
        interface, rows = _interface(net, None, None, None)
        with suppress(DecomposableError), replacing(target) as unfinished:
            size = artifact.save(unfinished, info)
            _check_known(copy.deepcopy(net).cpu().eval(), unfinished, interface, rows)
            return size
    return save_with_graph(net, path, info, **how).bytes


class _Stages:
    """Tells of each stage of the work as it begins, and of the last one size by size."""

    def __init__(self, report: Report) -> None:
        self._tracker = Tracker(report, "exporting", total=1.0)

    def begin(self, stage: str, part: float = 0.0, detail: str = "") -> None:
        """Say that a stage has begun, and which part of it is done."""
        names = list(_SHARES)
        before = sum(_SHARES[name] for name in names[: names.index(stage)])
        self._tracker.update(before + part * _SHARES[stage], ", ".join(filter(None, (stage, detail))))


def _interface(
    net: DecomposedNet, example_input: Any, forward: Forward | None, dynamic: object
) -> tuple[Interface, Feeds | None]:
    """Return what the file takes, and samples of it. The shapes have to be those at which the MACs were counted."""
    require_onnx()
    for name, parameter in net.named_parameters():
        if parameter.dtype not in (torch.float16, torch.float32, torch.float64):
            raise ExportError(
                f"export: '{name}' is {parameter.dtype}, which ONNX Runtime's CPU does not run; allowed: "
                "float32, float64 and float16"
            )
    known = known_of(net)
    call, rows = taken_by(ready(net._current.module), known, example_input, forward, net._forward)
    if known.call is not None and not same_shapes(known.call, call):
        raise InvalidArgumentError(
            f"export: example_input has samples of {_shapes(call)}, and the network's MACs were counted "
            f"at {_shapes(known.call)}; allowed: those shapes, or a network of decompose() with that example_input"
        )
    return interface_of(call, dynamic, None), rows


def _shapes(call: CallSignature) -> str:
    if call.is_default:
        return f"shape {call.inputs[INPUT].shape}"
    return " and ".join(f"shape {spec.shape} for '{name}'" for name, spec in call.inputs.items())


def _compare(
    net: DecomposedNet, path: Path, interface: Interface, trials: Trials, tolerance: float, stages: _Stages
) -> tuple[tuple[float, ...], float]:
    """Return the sizes at which the file was compared with PyTorch, and the largest difference.

    At full size it is tried with everything, at the smallest with all but the example, which may be large. Between
    them the graph is the same, with other weights, so that one row is enough.
    """
    plans, largest, sizes = _plans(net.selector), 0.0, list[float]()
    with _session(path) as session:
        for plan in plans:
            stages.begin(COMPARING, len(sizes) / len(plans), f"{len(sizes)} of {len(plans)} sizes")
            sizes.append(position(plan))
            ends = {plans[-1].ranks: trials.batches, plans[0].ranks: trials.all}
            batches = ends.get(plan.ranks, (trials.one_row,))
            largest = max(largest, _difference(net, session, plan, interface, batches))
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
    """Open a file that nobody else has seen, as a device would."""
    from decomposable_edge import AnySizeSession

    try:
        yield AnySizeSession(path, threads=min(torch.get_num_threads(), os.cpu_count() or 1), keep=1)
    except ArtifactError as error:  # it names a file that nobody will see
        raise ExportError(f"export: {error.reason or error}; nothing was written") from error


def _difference(
    net: DecomposedNet, session: AnySizeSession, plan: RankPlan, interface: Interface, batches: Sequence[Feeds]
) -> float:
    """Return how far a session is from PyTorch at a size."""

    def candidate(batch: Feeds) -> list[Any]:
        found = session.run({name: as_numpy(batch[name]) for name in interface.names})
        return found if isinstance(found, list) else [found]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of statistics: an export uses no size
        session.resize(plan)
        net.resize_(plan)
    return largest_difference(torch_runner(net, interface.call), candidate, batches)


def _plans(selector: RankSelector) -> list[RankPlan]:
    """Return the sizes to compare: the ends, some in between, and one that has truncated layers run densely."""
    plans = [selector.full_plan(), selector.plan_for(SizeRequest(ratio=_TRUNCATED))]
    plans += [selector.of_size(size) for size in _CHECKED if size >= selector.smallest_size]
    plans.append(selector.smallest_plan())
    return list({plan.ranks: plan for plan in plans}.values())
