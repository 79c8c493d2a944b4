"""`AnySizeSession`: one file on a device, run at any size. numpy, onnx and onnxruntime only.

    file ── choose a plan ── build its model ── make an ONNX Runtime session ── make it the current one

A size is an immutable whole, made the current one by one assignment. `run` takes no lock and holds on to the size that
it began with, so a request that is under way ends at that size, whatever happens in other threads.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from decomposable_edge.building import build
from decomposable_edge.checks import check_count, is_number
from decomposable_edge.errors import ArtifactError, DecomposableError, InvalidArgumentError
from decomposable_edge.feeding import example, feeds_of, in_one_line, refusing
from decomposable_edge.file.container import Array
from decomposable_edge.locks import ForkLock
from decomposable_edge.network import open_network
from decomposable_edge.onnx_runtime import RuntimeOptions, onnx_runtime
from decomposable_edge.sizing.interpolation import with_warning
from decomposable_edge.sizing.latency import LatencyProfile, choose_timed
from decomposable_edge.sizing.plans import RankPlan, SizeKeywords, SizeRequest, plan_or_request
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.rounding import DEFAULT_ALIGN
from decomposable_edge.sizing.sweep import Runs, sweep

if TYPE_CHECKING:
    from typing_extensions import Unpack

ort = onnx_runtime()
_ORT = "onnxruntime"

USUAL = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)
"""The sizes that `AnySizeSession.sizes` lists, as far as there are such."""


@dataclass(frozen=True, eq=False)
class _Size:
    """What a resize replaces as one. The runtime reads `weights` where they are: they live as long as the session.

    It runs in the process that made it alone: after a fork, the runtime's threads are not there.
    """

    plan: RankPlan
    runtime: Any
    weights: Mapping[str, Array]
    process: int = field(default_factory=os.getpid)


_made: WeakSet[_Size] = WeakSet()
_left_behind: list[_Size] = []  # the child of a fork keeps for ever what its parent has made: letting go of it hangs
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _left_behind.extend(_made))


class AnySizeSession:
    """A network from a file of `net.save`, run by ONNX Runtime at any size.

    A file's graph is code, as that of every ONNX model: damage is found, but open only those of people whom you trust.

    Args:
        path: the file.
        threads: how many threads work on one request; by default OMP_NUM_THREADS, as in PyTorch, or else one for each
            core.
        providers: ONNX Runtime's execution providers, best first; by default its CPU.
        session_options: a function that makes an ``onnxruntime.SessionOptions``, called for every size; where
            `threads` is not given, its first one says how many.
        keep: of how many recent sizes the sessions are kept, so that going back to one takes no time.
        macs, params, ratio, ranks, latency_ms, align, batch: the size to start with, as in `resize`; by default the
            full one.

    Attributes:
        path, threads: as they were given.
        selector: what all sizes are prefixes of, and what they cost; `plan` tells the plan of a size.
        inputs, outputs: name, shape and type of each.
        info: what the network's maker stored with it, such as measured accuracies.

    Example::

        session = AnySizeSession("resnet.safetensors")
        session.resize(macs=0.25)
        y = session.run(x)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        providers: Sequence[Any] | None = None,
        session_options: Callable[[], Any] | None = None,
        keep: int = 4,
        **size: Unpack[SizeKeywords],
    ) -> None:
        request = SizeRequest.of("AnySizeSession", size, "threads", "providers", "session_options", "keep")
        self._keep = check_count("keep", keep)
        self._options = RuntimeOptions.of(threads, providers, session_options)
        self.threads = self._options.threads
        self._bundle = open_network(path)
        self.path, self.info, self.selector = self._bundle.path, self._bundle.info, self._bundle.selector
        self.inputs, self.outputs = self._bundle.inputs, self._bundle.outputs
        self._latency: LatencyProfile | None = None
        self._kept: OrderedDict[Any, _Size] = OrderedDict()
        self._lock = ForkLock()  # one resize at a time; runs take no lock
        self._has_warned = False
        self._current: _Size
        self._use(self._plan_for(request) if request.given() else self.selector.full_plan())

    @property
    def sizes(self) -> tuple[RankPlan, ...]:
        """Some of the sizes that it can have, from the largest to the smallest."""
        return usual_plans(self.selector)

    @property
    def kept(self) -> tuple[RankPlan, ...]:
        """Return the sizes that are kept ready, the most recent one last."""
        with self._lock:
            return tuple(size.plan for size in self._kept.values())

    @property
    def latency(self) -> LatencyProfile | None:
        """Return what `measure` found, here or in an earlier session; it lies beside the file."""
        if self._latency is None:
            self._latency = LatencyProfile.load_beside(self.path)
        return self._latency

    def measure(
        self,
        sizes: Sequence[float] | None = None,
        *,
        batch: int = 1,
        seconds: float = 10.0,
        align: int | str = DEFAULT_ALIGN,
    ) -> LatencyProfile:
        """Time the full size and others on this device; ``resize(latency_ms=...)`` knows them from now on.

        All sizes take turns, so that a slow moment slows all alike; medians and quartiles are kept, beside the
        file. Nothing else should run meanwhile. The current size stays.

        Args:
            sizes: as in ``resize(macs=...)`` (``params=`` where MACs are not known); by default a few usual ones.
            batch: samples in a request.
            seconds: about how long to measure; every size runs at least 5 times.
            align: what ranks are rounded to, as in `resize`; "measured" tries several first and takes the fastest.
        """
        if sizes is not None and not _are_numbers(sizes):
            raise InvalidArgumentError(f"measure: sizes={sizes!r:.80}; allowed: a list of numbers, such as [0.5, 0.25]")
        if not is_number(seconds) or not 0 <= seconds < math.inf:
            raise InvalidArgumentError(f"measure: seconds={seconds!r:.40}; allowed: a number of at least 0")
        feeds = example(self.inputs, batch, self._bundle.lengths)

        @contextmanager
        def making(plans: Mapping[str, RankPlan]) -> Iterator[Runs]:
            opened = {name: self._make(plan, spins=False) for name, plan in plans.items()}
            runs = {name: partial(size.runtime.run, None, feeds) for name, size in opened.items()}
            with refusing(f"batch={batch}: ONNX Runtime cannot run the network on it"):
                for run in runs.values():
                    run()
            yield runs

        entry = sweep(
            self.selector, making, sizes, runtime=_ORT, batch=batch, threads=self.threads, seconds=seconds, align=align
        )
        profile = LatencyProfile.of(self.selector, [entry])
        self._latency = profile  # before it is written: where that fails, this session knows it all the same
        profile.save(LatencyProfile.path_beside(self.path))
        self._latency = LatencyProfile.load_beside(self.path)  # with what was measured in other ways before
        return profile

    def plan(self, **size: Unpack[SizeKeywords]) -> RankPlan:
        """Return the plan that `resize` would take for a size; without a size, the current plan. Nothing changes."""
        request = SizeRequest.of("plan", size)
        return self._plan_for(request) if request.given() else self._with_warning(self._current.plan)

    def resize(self, plan: RankPlan | None = None, /, **size: Unpack[SizeKeywords]) -> RankPlan:
        """Change the size and return the plan; requests of other threads keep the old one until the new one is ready.

        Give a plan of this network, or a size by keywords, as everywhere (`SizeKeywords` says what each means): one of
        ``macs=``, ``params=``, ``ratio=``, ``ranks=``, or after `measure` ``latency_ms=``, the time that a request may
        take here; and ``align=`` or ``batch=`` where a default is not right.

        Where batch normalisation has no statistics of the size, `warning` of the plan says so; it is warned of once.
        """
        asked = plan_or_request("resize", plan, size)
        if isinstance(asked, RankPlan):
            self.selector.check_plan(asked)
        return self._use(self._with_warning(asked) if isinstance(asked, RankPlan) else self._plan_for(asked))

    def run(self, x: Array | Mapping[str, Array]) -> Any:
        """Return the network's output at the current size: an array, or a list of them where it has several outputs.

        Inputs are given by name, as a dict of arrays; where there is one, the array alone will do.
        """
        size = self._current  # once: the whole request is of this size
        if size.process != os.getpid():  # in the child of a fork
            with self._lock:
                size = self._current = self._size_of(self._current.plan)
        feeds = feeds_of(self.inputs, x)
        try:
            results = size.runtime.run(None, feeds)
        except Exception as error:  # ONNX Runtime has many kinds
            raise DecomposableError(f"run: ONNX Runtime failed: {in_one_line(error)}") from error
        return results[0] if len(results) == 1 else results

    def prepare(self) -> None:
        """Read now what sizes near the full one need, so that the first resize to one is as fast as the others.

        It takes the memory of the dense weights. A session that starts at full size has done this already.
        """
        for layer in self._bundle.layers:
            if layer.is_used:
                layer.weight()

    def __repr__(self) -> str:
        plan = self._current.plan
        part = plan.params_fraction if plan.macs_fraction is None else plan.macs_fraction
        measure = "parameters" if plan.macs_fraction is None else "MACs"
        return f"{type(self).__name__}({str(self.path)!r}; {len(plan.ranks)} layers decomposed; {part:.3f}x {measure})"

    def _plan_for(self, request: SizeRequest) -> RankPlan:
        known, threads = self._bundle.statistics, self.threads
        return self._with_warning(
            choose_timed(self.selector, lambda: self.latency, request, calibrated=known, runtime=_ORT, threads=threads)
        )

    def _with_warning(self, plan: RankPlan) -> RankPlan:
        statistics = self._bundle.statistics
        found = with_warning(plan, statistics, has_norms=statistics is not None or self._bundle.lacks_statistics)
        return found if found.warning is None else replace(found, warning=f"{found.warning}, and save it again")

    def _use(self, plan: RankPlan) -> RankPlan:
        """Make this the current size; say what a plan warns of, once in a session's life."""
        if plan.warning is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(plan.warning, stacklevel=3)
        with self._lock:
            self._current = self._size_of(plan)
        return plan

    def _size_of(self, plan: RankPlan) -> _Size:
        """Return the size of a plan: one that is kept, or made now."""
        key = plan.ranks, plan.dense
        size = self._kept.pop(key, None)
        if size is None or size.process != os.getpid():
            size = self._make(plan)
            _made.add(size)
        self._kept[key] = size
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)
        return size

    def _make(self, plan: RankPlan, *, spins: bool = True) -> _Size:
        model, options = build(self._bundle, plan), self._options.made(spins=spins)
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in model.weights.values()]
        options.add_external_initializers(list(model.weights), values)
        try:
            runtime = ort.InferenceSession(model.content, options, providers=self._options.providers)
        except Exception as error:  # ONNX Runtime has many kinds
            raise ArtifactError.of(self.path, f"ONNX Runtime cannot run it: {in_one_line(error)}") from error
        return _Size(plan, runtime, model.weights)


def _are_numbers(value: object) -> bool:
    return isinstance(value, list | tuple | np.ndarray) and all(map(is_number, value))


def usual_plans(selector: RankSelector) -> tuple[RankPlan, ...]:
    """Return the full size, the smallest one, and usual ones in between, from the largest to the smallest."""
    sizes = [selector.of_size(size) for size in USUAL if selector.smallest_size <= size < 1]
    plans = [selector.full_plan(), *sizes, selector.smallest_plan()]
    return tuple({plan.ranks: plan for plan in plans}.values())
