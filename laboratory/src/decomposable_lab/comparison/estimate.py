"""About how long a comparison takes: a few steps of each method are made here and now, and counted up.

Where a step is long, those of two small batches are timed in its place. What does not depend on the batch, such as the
SVDs, and what each image adds tell how long the step is:  t(B) = t(b) + (B − b) · (t(2b) − t(b)) / b.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any

import torch

from decomposable.data.base import Data, TrainBatches
from decomposable.network.decompose import decompose
from decomposable.progress import Progress, Report
from decomposable.recipes.settings import Settings
from decomposable.training.loop import moved
from decomposable.training.metrics import read_metrics
from decomposable_edge.errors import DataError, DecomposableError
from decomposable_lab.comparison.parts import Circumstances, Comparison, TrainingJob
from decomposable_lab.comparison.scheduling import threads_for
from decomposable_lab.comparison.stepping import Stepper, fresh_model

TIMED_CALLS = 4
ENOUGH_SECONDS = 2.0  # of calls that are timed: then there are no more of them
LONG_SECONDS = 5.0  # a first call that takes so long counts: what comes with being the first is little of it
SMALL_PART = 16  # of a batch: the smaller one of the two that stand for a long step
MOMENTS = (0.25, 0.75)  # of a training: when steps are timed that are others early than late
START_SECONDS = 4.0  # of a process: python and torch


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Hold the state of one training, and about how many seconds are left to do."""

    part: TrainingJob
    state: str  # "done", "cut off", "to do", "cannot", or "no data": then nothing can be timed
    seconds: float
    reason: str = ""  # why it cannot, or which data

    def as_plain(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        which = {"method": self.part.method, "seed": self.part.seed, "training": self.part.training.folder}
        return {**which, "state": self.state, "seconds": round(self.seconds, 1), "reason": self.reason}


def estimate(
    comparison: Comparison,
    circumstances: Circumstances,
    *,
    jobs: int,
    progress: Report,
    clock: StepClock | None = None,
) -> list[Estimate]:
    """Return every training of a comparison with about how long it takes; nothing is written.

    Comparisons of one recipe can share a `clock`, so that a step is timed once.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_for(jobs))
    clock = clock or StepClock(comparison.settings, circumstances)
    try:
        return [_estimated(part, clock, progress) for part in comparison.parts]
    finally:
        torch.set_num_threads(threads)


def _estimated(part: TrainingJob, clock: StepClock, progress: Report) -> Estimate:
    if part.is_done:
        return Estimate(part=part, state="done", seconds=0.0)
    try:
        return Estimate(part=part, state="cut off" if part.is_begun else "to do", seconds=clock.seconds(part, progress))
    except DataError:
        raise
    except DecomposableError as error:  # a model that a method cannot train
        return Estimate(part=part, state="cannot", seconds=0.0, reason=str(error))


def without_data(comparison: Comparison, reason: str) -> list[Estimate]:
    """Return every training of a comparison whose data are not here: what there is of it, and why nothing was timed."""
    return [
        Estimate(part=part, state="done", seconds=0.0)
        if part.is_done
        else Estimate(part=part, state="no data", seconds=0.0, reason=reason)
        for part in comparison.parts
    ]


def total_seconds(estimates: list[Estimate], jobs: int) -> float:
    """Return the seconds with this many side by side; at least those of the longest chain of trainings."""
    by_path = {entry.part.path: entry for entry in estimates}

    def chain(entry: Estimate) -> float:
        return entry.seconds + max((chain(by_path[path]) for path in entry.part.needs if path in by_path), default=0.0)

    start = START_SECONDS if jobs > 1 and any(e.seconds for e in estimates) else 0.0
    return start + max(sum(e.seconds for e in estimates) / jobs, max((chain(e) for e in estimates), default=0.0))


class StepClock:
    """Measure the seconds of a step of each method, and of a test image, when they are first asked for."""

    def __init__(self, settings: Settings, circumstances: Circumstances) -> None:
        self.settings, self.task = settings, circumstances.task(settings)
        self.device = torch.device(circumstances.device)
        self._seconds: dict[Any, float] = {}

    @cached_property
    def data(self) -> Data:
        """Read when a training is left to do."""
        return self.task.load_data()

    def seconds(self, part: TrainingJob, progress: Report) -> float:
        """Return the seconds of the training, the tests in between, the calibration and the sizes."""
        settings = part.settings
        per_epoch = self.data.train_count // settings.batch_size
        # Of a training that was cut off, its metrics say how far it is: a checkpoint is large.
        lines = read_metrics(part.folder.metrics) if part.is_begun else []
        left = settings.epochs * per_epoch - max((line["step"] for line in lines), default=0)
        tests = math.ceil(settings.epochs / settings.evaluate_every)
        variants = max(1, len(part.training.variants))
        sizes = len(settings.sizes) * variants
        images = (tests + sizes) * self.data.test_count + 2 * sizes * settings.calibration_images
        step, image, decomposition = self._step(part, progress), self._image(progress), self._decomposition(progress)
        # On average a size costs half of the whole, but thin layers are slower than their MACs say.
        return left * step + 0.75 * images * image + variants * decomposition

    def _once(self, key: Any, what: str, progress: Report, timed: Callable[[], float]) -> float:
        if key not in self._seconds:
            progress(Progress("timing", what))
            self._seconds[key] = timed()
        return self._seconds[key]

    def _step(self, part: TrainingJob, progress: Report) -> float:
        # How fast a network is whose ranks come from weights that are not there yet, nobody knows: as the full one.
        is_known = part.training.init is None and part.training.ranks is None
        method = part.method if is_known else "plain"
        settings = replace(part.settings, method=method)
        key = (method, part.training.pace, settings.form, settings.batch_size)
        return self._once(key, f"a step of {method}", progress, lambda: self._of_a_step(settings))

    def _of_a_step(self, settings: Settings) -> float:
        """Return a whole one where it is quick, else as two small batches tell."""
        whole, small = settings.batch_size, max(2, settings.batch_size // SMALL_PART)

        def of(count: int) -> float:
            batch = self._batch(count, settings)
            # A new one has no bases yet: its first step computes those that it shares with the next ones.
            stepper = Stepper(self.task, settings, self._batch(1, settings)[0], self.device)
            moments = MOMENTS if stepper.is_paced else (0.0,)
            return fmean(timed(partial(stepper, batch, moment), shared_by=stepper.refresh) for moment in moments)

        at_small = of(small)
        if whole <= 2 * small or at_small * whole / small < ENOUGH_SECONDS:
            return of(whole)
        per_image = min(max(0.0, of(2 * small) - at_small), at_small) / small  # what else the machine does is no cost
        return at_small + (whole - small) * per_image

    def _batch(self, count: int, settings: Settings) -> Any:
        return TrainBatches(self.data, batch_size=count, epochs=1, seed=settings.seed)[0]

    def _image(self, progress: Report) -> float:
        def of_an_image() -> float:
            count = min(max(1, self.settings.batch_size // 4), self.data.test_count)
            x, _ = moved(self.data.test_batch(torch.arange(count)), self.device, self.settings)
            model = fresh_model(self.task, self.settings, self.device).eval()
            with torch.no_grad():
                return timed(lambda: model(x)) / count

        return self._once("image", "a test", progress, of_an_image)

    def _decomposition(self, progress: Report) -> float:
        def of_a_model() -> float:
            x, _ = self.data.test_batch(torch.arange(1))
            model = fresh_model(self.task, self.settings, self.device)
            return timed(lambda: decompose(model, example_input=x, form=self.settings.form), 1)

        return self._once("decomposition", "a decomposition", progress, of_a_model)


def timed(function: Callable[[], Any], most: int = TIMED_CALLS, *, shared_by: int = 1) -> float:
    """Return the seconds of a call: the least of a few, as other work only adds to it. The first one, which has
    more to do, counts only where it is long; or, where so many calls share what it does, with their share of that.
    """
    seconds: list[float] = []
    while len(seconds) <= most and sum(seconds[1:]) < ENOUGH_SECONDS:
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if seconds[0] >= LONG_SECONDS and shared_by == 1:
            return seconds[0]
    least = min(seconds[1:])
    return least if shared_by == 1 else least + max(0.0, seconds[0] - least) / shared_by
