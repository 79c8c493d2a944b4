"""From a recipe to a network of any size: train, decompose, calibrate, measure, and keep everything in one folder."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decomposable import recipes
from decomposable.core.processes import ALONE, Processes
from decomposable.data.base import TrainBatches, has_labels
from decomposable.progress import Report, quiet, shown
from decomposable.recipes.settings import Settings
from decomposable.training import finishing, methods, records
from decomposable.training import loop as training
from decomposable.training.checkpoint import Checkpoints, position_in, read_checkpoint
from decomposable.training.devices import bits_depend_on, make_deterministic, seed_everything
from decomposable.training.distributed import (
    agreed,
    file_of_the_first,
    from_the_first,
    joined,
    leave_process_group,
    seed_own_,
)
from decomposable.training.evaluation import WrongDataError, accuracy, check_outputs
from decomposable.training.loop import Say, Watchers
from decomposable.training.methods.base import Looking
from decomposable.training.metrics import MetricsLog
from decomposable.training.runs import Job, check_same_run, finished, prepare
from decomposable.training.weights import load_weights_
from decomposable_edge.interrupts import stop_signals
from decomposable_edge.machine import keep_freed_memory, timestamp
from decomposable_edge.text import first_line, one_line


def train(
    recipe: str | recipes.Recipe,
    *,
    out: Path | str,
    data: Path | str | None = None,
    init: Path | str | None = None,
    resume: bool = False,
    device: str = "auto",
    checkpoint_seconds: float = 60.0,
    progress: Report | None = None,
    say: Say = quiet,
    **settings: Any,
) -> dict[str, Any]:
    """Run a recipe, as `decomposable train` does, and return the record.

    Args:
        recipe: a built-in name, ``"package.module:function"``, or the function itself.
        out: the folder of the run.
        data: where the data set is.
        init: weights to start from.
        resume: go on where a run in `out` was cut off, or start it.
        device: "auto", "cpu", "cuda" …
        checkpoint_seconds: from one checkpoint to the next.
        progress: called with a `Progress`, which is text, about the current step; by default it is shown on a
            terminal. `decomposable.progress.quiet` shows nothing.
        say: called with a line for every epoch.
        **settings: of the recipe, to be replaced, such as ``epochs=10``.
    """
    how: dict[str, Any] = {"resume": resume, "checkpoint_seconds": checkpoint_seconds, "overrides": settings}
    with joined(device) as (processes, own_device), shown(progress if processes.is_first else quiet) as report:
        job = agreed(processes, lambda: prepare(recipe, out=out, data=data, init=init, device=own_device, **how))
        return run(job, progress=report, say=say if processes.is_first else quiet, processes=processes)


def run(job: Job, *, progress: Report = quiet, say: Say = quiet, processes: Processes = ALONE) -> dict[str, Any]:
    """Train if that is not done yet, then make the artifact and the record, and return the record.

    A complete run is calibrated anew if those settings have changed. Of several processes the first one has the
    folder, and the others get the record.
    """
    record = agreed(processes, lambda: finished(job) if processes.is_first else None)
    if processes.anywhere([processes.is_first and record is None])[0]:
        return _trained(job, progress, say, processes)
    return from_the_first(processes, threading.Event(), lambda: _complete(job, record or {}, progress, say))


def _complete(job: Job, record: dict[str, Any], progress: Report, say: Say) -> dict[str, Any]:
    """Return the record of a run that was complete before."""
    job.folder.checkpoint.unlink(missing_ok=True)  # it is there if the run was killed in its very last moment
    if changed := finishing.changed_calibration(job, record):
        return finishing.calibrate_anew(job, record, changed, progress=progress, say=say)
    say("this run is complete; nothing to do")
    return record


class _Ready(NamedTuple):
    """All that a run begins or goes on with; nothing is written yet."""

    batches: TrainBatches
    identity: dict[str, Any]
    saved: dict[str, Any] | None
    steps_made: int
    method: methods.Method
    network: nn.Module
    step: methods.Step


def _make_ready(job: Job, checkpoint: Path, processes: Processes) -> _Ready:
    """Read and compare everything, then build the network and try it."""
    settings = job.settings
    batches = _batches(job.task, settings, (processes.index, processes.count))
    identity = {**job.identity, "data": finishing.counts(batches.data)}
    saved = read_checkpoint(checkpoint) if checkpoint.exists() else None
    if saved is not None:
        check_same_run(job.folder.checkpoint, saved["run"], identity)
    steps_made = 0 if saved is None else position_in(saved, job.folder.checkpoint, batches).step
    require_labels(batches)
    seed_everything(settings.seed)
    model = job.task.build_model()
    if job.init is not None:
        load_weights_(model, job.init)
    x = first_pass(model, batches, settings, job.device)
    method = methods.find(settings.method)
    network = method.network(model, x[:1], settings, is_trained=job.init is not None).to(job.device)
    return _Ready(batches, identity, saved, steps_made, method, network, method.step(network, settings))


def _trained(job: Job, progress: Report, say: Say, processes: Processes) -> dict[str, Any]:
    """Complete a run and return its record; the folder is touched only when the run can really begin."""
    make_deterministic()
    keep_freed_memory()
    settings, started = job.settings, timestamp()
    code = records.commit()  # before the run: it may end after the next commit
    rate = settings.learning_rate if job.init is None else settings.fine_tune_learning_rate
    checkpoints = Checkpoints(job.folder.checkpoint, every_seconds=job.checkpoint_seconds)
    with file_of_the_first(checkpoints.path, processes) as checkpoint:
        ready = agreed(processes, lambda: _make_ready(job, checkpoint, processes))
    data, network = ready.batches.data, ready.network
    if isinstance(ready.step, Looking):
        seen = replace(settings, calibration_images=ready.step.images)
        ready.step.look_at(finishing.calibration_data_for(data, seen, job.task.loss, progress))
    seed_own_(settings.seed, processes)
    say(_opening(job, ready.batches, rate, processes))
    if ready.saved is not None:
        differences = _differences(ready.saved, job, processes)
        say(f"resuming at step {ready.steps_made:,} of {len(ready.batches):,}{differences}")
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        agreed(processes, lambda: stack.enter_context(job.folder.locked()) if processes.is_first else None)
        metrics = job.folder.metrics if processes.is_first else None
        log = stack.enter_context(MetricsLog(metrics, after_step=ready.steps_made))
        tested: dict[str, Any] = {
            "batch_size": settings.batch_size,
            "workers": settings.workers,
            "processes": processes,
        }
        position = training.train(
            network,
            ready.batches,
            ready.step,
            settings,
            loss=job.task.loss,
            evaluate=partial(accuracy, data=data, **tested),
            checkpoints=checkpoints,
            saved=ready.saved,
            watchers=Watchers(log=log, progress=progress, say=say),
            stop=stop,
            identity=ready.identity,
            peak_learning_rate=rate,
            commit=code,
            processes=processes,
        )
        leave_process_group(network, processes)

        def measured() -> dict[str, Any]:
            net, rows = finishing.at_its_sizes(job, ready.method, network, data, finishing.stopping(progress, stop))
            finishing.warn_of_statistics(net, settings, say)
            record = finishing.record_of(job, position, rows)
            record |= {"commit": code, "started": started, "identity": ready.identity}
            record |= {} if processes.is_alone else {"processes": processes.count}
            finishing.keep(net, record, job.folder, data, log)
            checkpoints.path.unlink(missing_ok=True)
            return record

        return from_the_first(processes, stop, measured)


def _batches(task: recipes.Task, settings: Settings, place: tuple[int, int] = (0, 1)) -> TrainBatches:
    schedule = {"batch_size": settings.batch_size, "epochs": settings.epochs, "seed": settings.seed}
    return TrainBatches(task.load_data(), **schedule, place=place)


def require_labels(batches: TrainBatches) -> None:
    """Refuse to train with images whose classes nobody knows."""
    if not has_labels(batches[0]):
        why = "the training images have no labels"
        raise WrongDataError.about("data", None, "labelled ones (a cut needs none)", why=why)


def try_out(task: recipes.Task, settings: Settings, device: str) -> None:
    """Load the data and run a batch through the model, to see what cannot be trained before anything is written."""
    batches = _batches(task, settings)
    require_labels(batches)
    first_pass(task.build_model(), batches, settings, device)


def first_pass(model: nn.Module, batches: TrainBatches, settings: Settings, device: str) -> Tensor:
    """Run a batch through the model where it is going to compute, and return the inputs."""
    data = batches.data
    model.to(device)
    if settings.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if data.test_count < 1:
        raise WrongDataError.about("data", 0, "at least one", why="there are no test images")
    x, _ = training.moved(batches[0], torch.device(device), settings)
    try:
        with torch.no_grad():  # not inference mode: what a model keeps from a pass must be fit for training
            outputs = model.eval()(x)
    except Exception as error:  # whatever a model of somebody else raises
        reason = first_line(error) + ("; channels_last=false may help" if settings.channels_last else "")
        why = f"it cannot run a batch of shape {tuple(x.shape)} ({reason})"
        raise WrongDataError.about("model", tuple(x.shape), "one that runs the data's batches", why=why) from error
    check_outputs(outputs, data.classes)
    return x


def _opening(job: Job, batches: TrainBatches, rate: float, processes: Processes) -> str:
    start = f"from {job.init.name}" if job.init is not None else "from scratch"
    data = batches.data
    return (
        f"{job.recipe}: method {job.settings.method}, {start}; {data.train_count:,} training and "
        f"{data.test_count:,} test images; epochs: {batches.epochs}, of {batches.per_epoch:,} steps; "
        f"learning rate {rate:g}; on {job.device}" + ("" if processes.is_alone else f", in {processes.count} processes")
    )


def _differences(saved: Mapping[str, Any], job: Job, processes: Processes) -> str:
    """Return what makes the last bits differ from those of a run that was not cut off."""
    now, then = bits_depend_on(job.device, processes.count), saved["bits_depend_on"]
    different = [f"{k} {one_line(then[k], 80)}, now {now[k]}" for k in now if k in then and then[k] != now[k]]
    return f" (begun with {', '.join(different)}: the last bits may differ)" if different else ""
