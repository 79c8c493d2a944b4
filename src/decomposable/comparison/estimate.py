"""About how long a comparison takes: a few steps of each method are made here and now, and counted up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import nn

from decomposable import methods
from decomposable.comparison.parts import Circumstances, Comparison, Part
from decomposable.comparison.scheduling import threads_for
from decomposable.data.base import Data, TrainBatches
from decomposable.errors import DecomposableError
from decomposable.methods.settings import Settings
from decomposable.network.decompose import decompose
from decomposable.progress import Progress, Report
from decomposable.training import loop as training
from decomposable.training.devices import seed_everything
from decomposable.training.metrics import read_metrics

TIMED_STEPS = 4
START_SECONDS = 4.0  # of a process: python and torch


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One training: what there is of it, and about how many seconds are left to do."""

    part: Part
    state: str  # "done", "cut off", "to do", or "cannot"
    seconds: float
    reason: str = ""  # why it cannot

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        which = {"method": self.part.method, "seed": self.part.seed, "training": self.part.training.folder}
        return {**which, "state": self.state, "seconds": round(self.seconds, 1), "reason": self.reason}


def estimate(comparison: Comparison, circumstances: Circumstances, *, jobs: int, progress: Report) -> list[Estimate]:
    """Every training of a comparison with about how long it takes; nothing is written."""
    missing = [part for part in comparison.parts if not part.is_done]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_for(jobs))
    try:
        clock = _StepClock(missing[0].settings, circumstances, progress) if missing else None
        return [_estimated(part, clock) for part in comparison.parts]
    finally:
        torch.set_num_threads(threads)


def _estimated(part: Part, clock: _StepClock | None) -> Estimate:
    if clock is None or part.is_done:
        return Estimate(part=part, state="done", seconds=0.0)
    try:
        return Estimate(part=part, state="cut off" if part.is_begun else "to do", seconds=clock.seconds(part))
    except DecomposableError as error:  # a model that a method cannot train
        return Estimate(part=part, state="cannot", seconds=0.0, reason=str(error))


def total_seconds(estimates: list[Estimate], jobs: int) -> float:
    """With so many side by side; never less than what has to come one after the other."""
    by_path = {entry.part.path: entry for entry in estimates}

    def chain(entry: Estimate) -> float:
        return entry.seconds + max((chain(by_path[path]) for path in entry.part.needs if path in by_path), default=0.0)

    start = START_SECONDS if jobs > 1 and any(e.seconds for e in estimates) else 0.0
    return start + max(sum(e.seconds for e in estimates) / jobs, max((chain(e) for e in estimates), default=0.0))


class _StepClock:
    """The seconds of a step of each method, and of a test image, measured when they are first asked for."""

    def __init__(self, settings: Settings, circumstances: Circumstances, progress: Report) -> None:
        self.settings, self.task = settings, circumstances.task(settings)
        self.data: Data = self.task.load_data()
        self.device, self.progress = torch.device(circumstances.device), progress
        self._steps: dict[Any, float] = {}

    def seconds(self, part: Part) -> float:
        """Of the training, the tests on the way, the calibration and the sizes."""
        settings = part.settings
        per_epoch = self.data.train_count // settings.batch_size
        # Of a training that was cut off, its metrics say how far it is: a checkpoint is large.
        lines = read_metrics(part.folder.metrics) if part.is_begun else []
        left = settings.epochs * per_epoch - max((line["step"] for line in lines), default=0)
        tests = math.ceil(settings.epochs / settings.evaluate_every)
        variants = max(1, len(part.training.variants))
        sizes = len(settings.sizes) * variants
        images = (tests + sizes) * self.data.test_count + 2 * sizes * settings.calibration_images
        # On average a size costs half of the whole, but thin layers are slower than their MACs say.
        return left * self._step(part) + 0.75 * images * self._image + variants * self._decomposition

    def _step(self, part: Part) -> float:
        # How fast a network is whose ranks come from weights that are not there yet, nobody knows: as the full one.
        is_known = part.training.init is None and part.training.ranks is None
        method = part.method if is_known else "plain"
        settings = replace(part.settings, method=method)
        key = (method, part.training.pace, settings.form, settings.batch_size)
        if key not in self._steps:
            self.progress(Progress("timing", f"a step of {method}"))
            self._steps[key] = _timed(self._stepper(settings), TIMED_STEPS)
        return self._steps[key]

    def _stepper(self, settings: Settings) -> Callable[[], None]:
        batches = TrainBatches(self.data, batch_size=settings.batch_size, epochs=1, seed=settings.seed)
        batch = training.moved(batches[0], self.device, settings)
        model = self._model(settings)
        method = methods.find(settings.method)
        network = method.network(model, batch[0][:1], settings, is_trained=False).to(self.device).train()
        step = method.step(network, settings)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)

        def make() -> None:
            optimizer.zero_grad()
            step.backward(lambda net: self.task.loss(net, batch))
            optimizer.step()

        return make

    @cached_property
    def _image(self) -> float:
        self.progress(Progress("timing", "a test"))
        count = min(self.settings.batch_size, self.data.test_count)
        x, _ = training.moved(self.data.test_batch(torch.arange(count)), self.device, self.settings)
        model = self._model(self.settings).eval()
        with torch.no_grad():
            return _timed(lambda: model(x), TIMED_STEPS) / count

    @cached_property
    def _decomposition(self) -> float:
        self.progress(Progress("timing", "a decomposition"))
        x, _ = self.data.test_batch(torch.arange(1))
        model = self._model(self.settings)
        return _timed(lambda: decompose(model, example_input=x, form=self.settings.form), 1)

    def _model(self, settings: Settings) -> nn.Module:
        seed_everything(settings.seed)
        model = self.task.build_model().to(self.device)
        if settings.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model


def _timed(function: Callable[[], Any], repeats: int) -> float:
    """Seconds of a call, the first one not counted; the median, as a moment of the machine may be slow."""
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])
