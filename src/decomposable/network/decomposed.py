"""The decomposed network: one SVD, then every size is a view of it.

    model ── decompose ──▶ DecomposedNet ── resize_(macs=0.25) ──▶ the same network, smaller ── extract ──▶ plain module

A size is a module tree of its own: plain layers whose weights are slices of the factors, made in milliseconds by
`rewire`. The network holds one of them at a time, with the `NetworkState` that it was made from. Every change replaces
both as one value, so that a forward pass that is under way in another thread ends at the size it began with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from warnings import warn

import torch
from torch import Tensor, nn

from decomposable.core.criteria import Scores
from decomposable.core.distillation import Distance
from decomposable.core.factors import Factors
from decomposable.core.layers import Layer
from decomposable.core.tracing import Forward, on_device_of, other_macs, trace
from decomposable.core.tree import clone_buffers_, deep_copy, own_parameters_, rewire, undisturbed
from decomposable.network.calibration.batches import renewable
from decomposable.network.calibration.calibrating import calibrated, checked_plans, recalibrated
from decomposable.network.calibration.grid import PASSES
from decomposable.network.calibration.statistics import CalibrationReport, CalibrationTarget, Statistics
from decomposable.network.calls import CallSignature, InputSpec
from decomposable.network.file.container import FilePath
from decomposable.network.file.contents import Artifact, skeleton_of, state_of
from decomposable.network.judging import CutReport
from decomposable.network.original import Original
from decomposable.network.parts import NetworkState, Tuned
from decomposable.network.saving import GraphKeywords, SaveReport, saved
from decomposable.network.tuning import (
    LEARNING_RATE,
    STEPS,
    Task,
    TuningReport,
    check_training,
    checked_sizes,
    kl_of_logits,
    tuned,
    with_calibration,
)
from decomposable.progress import Report, shown
from decomposable_edge.device_graph import DeviceGraph
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.locks import ForkLock
from decomposable_edge.sizing.interpolation import with_warning
from decomposable_edge.sizing.latency import LatencyProfile
from decomposable_edge.sizing.plans import RankPlan, SizeKeywords, SizeRequest, plan_or_request
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.rounding import DEFAULT_ALIGN, Align, check_align

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OF_TRANSFORMERS = frozenset({"save_pretrained", "push_to_hub"})
"""What Hugging Face's models write themselves with: tensors that their classes have no place for."""


@dataclass(frozen=True, eq=False)
class _Current:
    """What a change replaces as one: the parts, the size among them, and the network made from them."""

    parts: NetworkState
    module: nn.Module


T = TypeVar("T")


class _Part(Generic[T]):
    """An attribute of the network that is one of its `NetworkState`; setting it replaces these."""

    def __set_name__(self, owner: type[DecomposedNet], name: str) -> None:
        self._name = name.removeprefix("_")

    def __get__(self, net: DecomposedNet, owner: type[DecomposedNet]) -> T:
        found: T = getattr(net._current.parts, self._name)
        return found

    def __set__(self, net: DecomposedNet, value: T) -> None:
        with net._lock:
            parts = replace(net._current.parts, **{self._name: value})  # type: ignore[arg-type]
            net._make_current(parts, net._current.module)


class DecomposedNet(nn.Module):
    """A network that can be run at any size; made by `decompose`, called like the model it was made from.

    `module` is the network at the current size, of plain layers; a resize replaces it, and so do `train` and `to`. Its
    parameters are not trainable, because they are shared by all sizes: to train one size further, `extract` it.

    Attributes:
        skipped: the layers and other parts with weights that are left alone, each with the reason and its share of the
            network.
        not_counted: modules with weights of their own that no MAC formula counts, with their type.
        call: how it is called, where an example input has told.
        inputs: what it takes, by name; `input` where that is one input.
        unclear: why an export cannot know what it takes, where that is so.
        graph: how it is wired, for devices, where it was saved or loaded with that.
        info: what a file that it was loaded from says besides, such as measured accuracies; empty otherwise.
        cut_report: how a cut by data was judged on samples that were kept out, and what was kept; None without data.
        latency_beside: the file whose latency profile `latency` reads, where it was loaded from one.
    """

    selector = _Part[RankSelector]()
    skipped = _Part[Mapping[str, str]]()
    not_counted = _Part[Mapping[str, str]]()
    call = _Part[CallSignature | None]()
    unclear = _Part[str | None]()
    info = _Part[Mapping[str, Any]]()
    graph = _Part[DeviceGraph | None]()
    inputs = _Part[Mapping[str, InputSpec]]()
    input = _Part[InputSpec | None]()
    _factors = _Part[Mapping[str, Factors]]()
    _statistics = _Part[Statistics | None]()
    _tuned = _Part[Tuned | None]()

    def __init__(self, *, base: nn.Module, layers: tuple[Layer, ...], parts: NetworkState, forward: Forward) -> None:
        super().__init__()
        self._rows: Mapping[str, Tensor] | None = None  # of the example input: exports are tried with them
        self._original, self._forward = Original(base, layers), forward
        self._has_warned = False
        self.latency_beside: Path | None = None
        self.cut_report: CutReport | None = None
        self._latency: LatencyProfile | None = None
        self._lock = ForkLock()  # one change at a time; forward passes take no lock
        self.training = base.training
        parts.selector.prepare()
        self._install(parts.alone())

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Return the decomposed layers: the name, the form and the original's weight of each."""
        return self._original.layers

    @property
    def scores(self) -> Mapping[str, tuple[Scores, ...]]:
        """Return what the bases are worth, by layer and cut, the best first: the order of all sizes.

        As the `criterion` of a `JointObjective`, or of another `decompose`, it gives that the same order. After a cut
        by data it is the order for budgets of MACs.
        """
        return self.selector.scores_by_layer

    @property
    def latency(self) -> LatencyProfile | None:
        """Return how long its sizes take on a machine, as `decomposable bench` measured it; None without that."""
        if self._latency is None and self.latency_beside is not None:  # read when asked for: few networks need it
            self._latency = LatencyProfile.load_beside(self.latency_beside)
        return self._latency

    @latency.setter
    def latency(self, profile: LatencyProfile | None) -> None:
        if profile is not None and not isinstance(profile, LatencyProfile):
            raise InvalidArgumentError.about("latency", profile, "a LatencyProfile or None")
        self._latency, self.latency_beside = profile, None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network at the current size."""
        return self._current.module(*args, **kwargs)

    def plan(self, *, runtime: str = "torch", **size: Unpack[SizeKeywords]) -> RankPlan:
        """Return the plan that `resize_` would take for a size; without a size, the current plan. Nothing changes.

        The keywords are those of `resize_`. Times are those that were measured in `runtime`, "torch" or "onnxruntime".
        """
        return self._plan_for(SizeRequest.of("plan", size, "runtime"), runtime)

    def resize_(self, plan: RankPlan | None = None, /, **size: Unpack[SizeKeywords]) -> RankPlan:
        """Change the size, in place, in milliseconds and without data, and return the plan, which prints as a table.

        It goes up and down as often as you like. Give a plan of this network, or exactly one of `macs` to `latency_ms`.

        Args:
            macs, params: a budget for the whole network: a part of the original's as a float, or a count above 1.
            ratio: the part Z of all bases to keep; taken literally.
            ranks: a rank by layer name, for a layer with several cuts a tuple; others stay full. Taken literally.
            latency_ms: the time that a pass may take on this machine, where `latency` knows that.
            align: what ranks are rounded to, within the budget: "auto" (the default) rounds those of wide layers to
                16, 8 or 4 where that moves them by a few percent at most; a number such as 8 rounds all to its
                multiples; 1 rounds none; "measured" takes what was found to be the fastest here.
            batch: which of several measured batches counts; by default the smallest.

        Where batch normalisation has no statistics of the size, `warning` of the plan says so; it is warned of once.
        """
        asked = plan_or_request("resize_", plan, size)
        if isinstance(asked, RankPlan):
            self.selector.check_plan(asked)
        chosen = self._with_warning(asked) if isinstance(asked, RankPlan) else self._plan_for(asked)
        self._warn_once(chosen, stacklevel=3)
        with self._lock:
            self.selector.check_plan(chosen)
            self._install(replace(self._current.parts, plan=chosen))
        return chosen

    def _plan_for(self, request: SizeRequest, runtime: str = "torch") -> RankPlan:
        parts = self._current.parts
        plan = parts.plan_for(request, lambda: self.latency, runtime) if request.given() else parts.plan
        return self._with_warning(plan)

    def _with_warning(self, plan: RankPlan) -> RankPlan:
        return with_warning(plan, self._statistics, has_norms=bool(self._original.norms))

    def _warn_once(self, plan: RankPlan, stacklevel: int) -> None:
        """Say what a plan warns of, where it is used; nothing where something was said before."""
        if plan.warning is not None and not self._has_warned:
            self._has_warned = True
            warn(plan.warning, stacklevel=stacklevel)

    def macs_for(self, batch: Any, forward: Forward | None = None) -> int:
        """Return the MACs of one sample at the current size for inputs such as these, of another length for instance.

        It counts as `decompose` does, the products inside attention included. The batch is run once.
        """
        twin = rewire(self._current.module, {})
        clone_buffers_(twin)
        with undisturbed(twin):
            return other_macs((), trace(twin, on_device_of(twin, batch), forward or self._forward))

    @torch.inference_mode(False)  # weights made in that mode could not be trained
    def extract(self, plan: RankPlan | None = None) -> nn.Module:
        """Return the network at the current size, or at that of a plan, as a plain module with no tie to this one."""
        module = self._current.module
        if plan is not None:
            with self._lock:
                self.selector.check_plan(plan)
                module = self._original.at_size(replace(self._current.parts, plan=plan))
        return self._original.with_trainable(deep_copy(module))

    def save(
        self,
        path: FilePath,
        info: Mapping[str, Any] | None = None,
        *,
        onnx: bool | None = None,
        **graph: Unpack[GraphKeywords],
    ) -> SaveReport:
        """Write the network at every size to one safetensors file: `load` reads it, and a device opens it.

        `info` is anything that JSON can hold, to be found in `info` of what is loaded; without it, `info` of this
        network is written. What passes in training mode wrote to the current size is left out, as by a resize. The
        file is written at once or not at all.

        For devices (`decomposable_edge.AnySizeSession`) it also holds the ONNX graph, without weights, compared with
        PyTorch at several sizes before the file is there. Making it takes seconds, once: a network that was saved or
        loaded with one has it. By default it is left out where the extra `onnx` is not installed or the network cannot
        be exported; the report says why. ``onnx=True`` refuses then, ``onnx=False`` leaves it out in any case.
        `example_input`, `forward`, `dynamic` and `tolerance` are as in `export_onnx`, `progress` as in `calibrate_`;
        any of them asks for a graph that is made anew.
        """
        report = saved(self, path, info, onnx, **graph)
        if onnx or graph:
            self.warn_of_statistics(stacklevel=3)
        return report

    def warn_of_statistics(self, *, stacklevel: int = 2) -> None:
        """Warn once if no size has statistics of batch normalisation: a device cannot make them."""
        if self._statistics is None:
            self._warn_once(self._with_warning(self.selector.smallest_plan()), stacklevel=stacklevel + 1)

    def artifact(self) -> Artifact:
        """Return what `save` writes, sharing this network's memory; `network.artifact` has functions for it."""
        with self._lock:
            original = self._original
            skeleton = skeleton_of(original.base, original.layers, original.trainable)
            return Artifact(**vars(self._current.parts), skeleton=skeleton, state=state_of(original.base))

    def calibrate_(
        self,
        loader: Iterable[Any],
        sizes: Sequence[float] | None = None,
        *,
        align: Align = DEFAULT_ALIGN,
        passes: float = PASSES,
        exact: bool = False,
        forward: Forward | None = None,
        progress: Report | None = None,
    ) -> CalibrationReport:
        """Compute batch normalisation statistics for a grid of sizes, once; every later resize uses them.

        Args:
            loader: yields tensors, or tuples or dicts whose first entry is the input, augmented as in training. A few
                thousand samples are enough. It is gone through once; up to 512 MiB of its batches are kept meanwhile.
            sizes: budgets as in ``resize_(macs=...)`` (``params=`` where MACs are not known), added to those stored.
                By default a grid of sizes, as dense as this network needs. The full size keeps the original's
                statistics, unless 1.0 is asked for here.
            align: as in ``resize_``. A grid of "auto" serves for unrounded ranks, too: they lie near enough. Sizes with
                ranks rounded to a number do not, and are added to those stored.
            passes: the most that a grid may cost, in forward passes of the full network over the loader.
            exact: for chosen `sizes`, the authors' way: layer by layer, a pass over the data for each. Slow.
            forward: ``forward(net, batch)``; by default that of `decompose`.
            progress: called with a line about how far it is, such as `print`; by default a terminal shows one.
        """
        align = check_align(align)
        plans = checked_plans(self.selector, sizes, align=align, passes=passes, exact=exact)
        if not self._original.norms:
            return CalibrationReport(sizes=0, batches=0, seconds=0.0, bytes=0, passes=0.0)
        subject = self._subject(self._current.parts, forward or self._forward)
        with shown(progress) as line:
            statistics, report = calibrated(
                subject, self.selector, plans, loader, align=align, passes=passes, exact=exact, report=line
            )
        with self._lock:
            if self._statistics is not None and (sizes is not None or align != DEFAULT_ALIGN):
                statistics = self._statistics.merged(statistics)
            self._take(statistics=statistics)
        return replace(report, bytes=statistics.bytes)

    def tune_(
        self,
        loader: Iterable[Any],
        sizes: Sequence[float] | None = None,
        *,
        steps: int = STEPS,
        learning_rate: float = LEARNING_RATE,
        distance: Distance | None = None,
        forward: Forward | None = None,
        passes: float = PASSES,
        progress: Report | None = None,
    ) -> TuningReport:
        """Train scales, shifts and biases of their own for some sizes, with the full network as the teacher.

        No labels are needed. Every later resize uses them, interpolated between these sizes. All other weights and the
        largest size stay as they are. Batch normalisation is calibrated anew afterwards, with the same loader.
        Tuning again replaces what was tuned; where it fails, nothing changes.

        Args:
            loader: as in `calibrate_`, gone through as often as the steps need. One that can be gone through only once
                is kept in memory, up to 512 MiB.
            sizes: as in `calibrate_`; by default some from 0.75 to 0.07. Sizes below the smallest one have its vectors.
            steps: of training for each size, one batch each.
            learning_rate: of Adam at the first step; it falls to nothing by the last.
            distance: ``distance(low, full)``, the loss for the outputs of a size and of the full network; by default KL
                divergence of the softmax over the last axis, for logits.
            forward, passes, progress: as in `calibrate_`.
        """
        check_training(steps, learning_rate, distance)
        plans = checked_sizes(self.selector, sizes)
        checked_plans(self.selector, None, align=DEFAULT_ALIGN, passes=passes, exact=False)
        parts, original, forward = self._current.parts, self._original, forward or self._forward
        vectors, layer_before_norm = original.vectors(parts.layer_before_norm)
        if not vectors:
            why = "it has no scale, shift or bias to tune"
            raise InvalidArgumentError.about("network", 0, "one that has some", why=why)
        batches, full_plan = renewable(loader, forward, "loader"), self.selector.full_plan()
        task = Task(
            build=lambda plan: original.uncalibrated(replace(parts, plan=plan, tuned=None)),
            teacher=original.at_size(replace(parts, plan=full_plan)).eval(),
            vectors=vectors,
            layer_before_norm=layer_before_norm,
            full_plan=full_plan,
            forward=forward,
            distance=distance or kl_of_logits,
            steps=steps,
            learning_rate=learning_rate,
        )
        with shown(progress) as line:
            found, report = tuned(task, plans, batches, line)
            statistics = parts.statistics
            if original.norms:
                subject = self._subject(replace(parts, tuned=found), forward)
                statistics, calibration = recalibrated(
                    subject, self.selector, statistics, batches, passes=passes, report=line
                )
                report = with_calibration(report, calibration)
        with self._lock:
            self._take(tuned=found, statistics=statistics)
        return report

    def forget_tuning_(self) -> None:
        """Drop what `tune_` has stored: all sizes have the original's scales, shifts and biases again.

        The statistics that were calibrated with those of their own are dropped, too: call `calibrate_` again.
        """
        with self._lock:
            if (tuned := self._tuned) is not None:
                # A part of a network was given those of its largest size when it was loaded.
                self._original.put_vectors_(tuned.original_vectors)
                self._take(tuned=None, statistics=None)

    def forget_statistics_(self) -> None:
        """Drop what `calibrate_` has stored: all sizes have the original's statistics, until it is called again."""
        with self._lock:
            self._take(statistics=None)

    def train(self, mode: bool = True) -> DecomposedNet:
        """Set training mode for this size and those to come; a pass under way ends in the mode it began with.

        What passes in training mode wrote to the statistics of the current size stays.
        """
        if not isinstance(mode, bool):
            raise InvalidArgumentError.about("mode", mode, "True or False")
        with self._lock:  # a size that is being made now must not be in the other mode
            self._original.base.train(mode)
            self.training = mode
            module = self._current.module
            if any(part.training != mode for part in module.modules()):
                twin = rewire(module, {})  # of its own modules, and the same tensors
                twin.train(mode)
                self._make_current(self._current.parts, twin)
        return self

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Refuse: the weights of one size are slices of those of all."""
        raise InvalidArgumentError(
            "load_state_dict: the weights of a decomposed network are shared by all its sizes; "
            "allowed: loading into the model before decompose(), or into what extract() returns"
        )

    def __getattr__(self, name: str) -> Any:
        """Return what only the model has, such as `generate` or `config`: that of the current size."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            current = self.__dict__.get("_current")
            if current is None or name.startswith("_"):
                raise
            if name in _OF_TRANSFORMERS:
                raise InvalidArgumentError(
                    f"{name}: the model's class cannot load layers of fewer bases, they would be random again; "
                    "allowed: decomposable.hf.save_pretrained(net, folder), or net.save(path)"
                ) from None
            try:
                return getattr(current.module, name)
            except AttributeError:
                kinds = f"{type(self).__name__} of a {type(current.module).__name__}"
                raise AttributeError(f"{kinds} has no attribute {name!r}") from None

    def __repr__(self) -> str:
        plan = self._current.parts.plan
        macs = "" if plan.macs_fraction is None else f"{plan.macs_fraction:.3f}x MACs, "
        size = f"{macs}{plan.params_fraction:.3f}x parameters"
        calibrated = len(self._statistics.plans) if self._statistics else 0
        layers = f"{len(self._original.layers)} layers decomposed, {len(self.skipped)} left alone"
        tuned = f", {len(self._tuned.plans)} tuned" if self._tuned else ""
        return f"{type(self).__name__}({layers}; {size}; {calibrated} sizes calibrated{tuned})"

    @property
    def _base(self) -> nn.Module:
        return self._original.base

    def _install(self, parts: NetworkState) -> None:
        """Make the network of these parts, complete, and make it the current one at once."""
        for known in (parts.statistics, parts.tuned):
            if known is not None:
                known.prepare()
        self._make_current(parts, self._original.at_size(parts))

    def _take(self, **parts: Any) -> None:
        self._has_warned = False  # of what was not calibrated before
        self._install(replace(self._current.parts, **parts))

    def _subject(self, parts: NetworkState, forward: Forward) -> CalibrationTarget:
        """Return the network of these parts, to be calibrated."""
        return CalibrationTarget(
            build=lambda plan: self._original.uncalibrated(replace(parts, plan=plan)),
            forward=forward,
            layer_before_norm=parts.layer_before_norm,
            full_plan=self.selector.full_plan(),
        )

    def _make_current(self, parts: NetworkState, module: nn.Module) -> None:
        self._modules["module"] = module
        self._current = _Current(parts, module)

    def _apply(self, fn: Any, recurse: bool = True) -> DecomposedNet:
        """Move or cast the original and the factors, and make the current size anew; a pass under way keeps its own."""
        with self._lock:
            own_parameters_(self._original.base)  # the current size has the same ones
            self._original.base._apply(fn)
            self._install(self._current.parts.map(fn))
        return self

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:  # while it is being copied it may be resized, which changes `_modules` in place
            state = {name: value for name, value in self.__dict__.items() if name != "_lock"}
            return {**state, "_modules": self._modules.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = ForkLock()
