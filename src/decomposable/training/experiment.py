"""From a recipe to a network of any size: train, decompose, calibrate, measure, and keep everything in one folder."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decomposable import methods, recipes
from decomposable.data.base import Batch, Data, TrainBatches
from decomposable.errors import InvalidArgumentError
from decomposable.files import write_atomically
from decomposable.interrupts import Interrupted, stop_signals
from decomposable.machine import timestamp
from decomposable.methods import decomposing
from decomposable.methods.loading import load
from decomposable.methods.registry import of_other_guests
from decomposable.methods.settings import Settings, flat, from_plain, with_overrides
from decomposable.network.decomposed import DecomposedNet
from decomposable.progress import InTurn, Progress, Report, quiet, shown
from decomposable.text import first_line, one_line
from decomposable.training import loop as training
from decomposable.training import records
from decomposable.training.checkpoint import Checkpoints, seed_everything
from decomposable.training.devices import bits_depend_on, choose_device, make_deterministic
from decomposable.training.divergence import Loss
from decomposable.training.evaluation import Row, WrongDataError, accuracy, check_outputs, measure
from decomposable.training.loop import Say, Watchers
from decomposable.training.metrics import MetricsLog, read_metrics
from decomposable.training.restoring import Position, position_in
from decomposable.training.runs import RunFolder, check_same_run
from decomposable.training.weights import load_weights_, sha256

OF_THE_CALIBRATION = ("calibrated_sizes", "calibrated_alignments", "calibration_images", "calibration_passes")
"""Settings of the statistics: where they have changed, a finished run is calibrated anew, and not trained."""
OF_THE_SIZES = ("sizes", *OF_THE_CALIBRATION)
"""Settings that change what is measured at the end, and nothing of the training."""
WITHOUT_EFFECT = ("workers", "evaluate_every", *OF_THE_SIZES)
"""Settings that do not change the weights, so that a run may be resumed with others."""
_OF_COMPARISONS = ("compare_", "tuning_")  # how settings begin that say which trainings there are, and nothing of one


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training: a recipe, its settings, and where things are."""

    recipe: str
    settings: Settings
    task: recipes.Task
    folder: RunFolder
    found: tuple[Any, ...] = ()  # the state of the folder when it was looked at
    init: Path | None = None
    init_sha256: str | None = None
    device: str = "cpu"
    checkpoint_seconds: float = 60.0
    command: str = ""
    curve: str = ""  # the name of what comes out, where there is something to tell it from
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # several ways to make sizes of it

    @property
    def identity(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one that was cut off."""
        without_effect = {*WITHOUT_EFFECT, *of_other_guests(self.settings.method)}
        settings = {
            key: value
            for key, value in plain_settings(self.settings).items()
            if key not in without_effect and not key.startswith(_OF_COMPARISONS)
        }
        return {"recipe": self.recipe, "init": self.init_sha256, "settings": settings}


def plain_settings(settings: Settings) -> dict[str, Any]:
    """The settings as JSON gives them back, so that those of a record and of a checkpoint are the same."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(flat(settings), default=str, allow_nan=False))
    except ValueError as error:
        raise InvalidArgumentError(f"settings: they cannot be stored ({error}); allowed: numbers and text") from error
    return plain


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
    """`decomposable train` from Python: run a recipe, by name or a function of your own; the record comes back.

    Args:
        recipe: a built-in name, ``"package.module:function"``, or the function itself.
        out: the folder of the run.
        data: where the data set is.
        init: weights to start from.
        resume: go on where a run in `out` was cut off, or start it.
        device: "auto", "cpu", "cuda" …
        checkpoint_seconds: from one checkpoint to the next.
        progress: called with a `Progress`, which is text, about the step under way; by default it is shown on a
            terminal. `decomposable.progress.quiet` shows nothing.
        say: called with a line for every epoch.
        **settings: of the recipe, to be replaced, such as ``epochs=10``.
    """
    job = prepare(
        recipe,
        out=Path(out),
        data=None if data is None else Path(data),
        init=None if init is None else Path(init),
        resume=resume,
        device=device,
        checkpoint_seconds=checkpoint_seconds,
        overrides=settings,
    )
    with shown(progress) as report:
        return run(job, progress=report, say=say)


def prepare(
    recipe: str | recipes.Recipe,
    *,
    out: Path,
    data: Path | None = None,
    settings: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    init: Path | None = None,
    resume: bool = False,
    device: str = "auto",
    checkpoint_seconds: float = 60.0,
    command: str = "",
    curve: str = "",
    variants: Mapping[str, Mapping[str, Any]] | None = None,
) -> Job:
    """Check everything that can be checked before anything is written."""
    function = recipes.find(recipe) if isinstance(recipe, str) else recipe
    name = recipe if isinstance(recipe, str) else f"{function.__module__}:{function.__qualname__}"
    chosen = with_overrides(settings or recipes.default_settings(function), overrides or {})
    methods.find(chosen.method).check(chosen, has_init=init is not None)
    if not checkpoint_seconds >= 0:
        raise InvalidArgumentError(f"--checkpoint-seconds {checkpoint_seconds:g}; allowed: a number of at least 0")
    folder = RunFolder(out)
    folder.check(resume=resume)
    job = Job(
        recipe=name,
        settings=chosen,
        task=recipes.make_task(function, data, chosen),
        folder=folder,
        found=folder.state,
        init=init,
        init_sha256=None if init is None else sha256(init),  # now: the file may be gone or another when the run ends
        device=choose_device(device),
        checkpoint_seconds=checkpoint_seconds,
        command=command,
        curve=curve,
        variants=dict(variants or {}),
    )
    plain_settings(chosen)
    return job


def run(job: Job, *, progress: Report = quiet, say: Say = quiet) -> dict[str, Any]:
    """Train where that is not done yet, then make the artifact and the record; the record comes back.

    A run that is complete is calibrated anew where the settings of that have changed.
    First everything is read and compared, then built and tried; the folder is touched when a run can really begin.
    """
    record = finished(job)
    if record is not None:
        job.folder.checkpoint.unlink(missing_ok=True)  # where the run was killed in its very last moment
        changed = _changed_calibration(job, record)
        if changed:
            return _calibrated_anew(job, record, changed, progress=progress, say=say)
        say("this run is complete; nothing to do")
        return record
    make_deterministic()
    settings, started = job.settings, timestamp()
    code = records.commit()  # before the run: it may end after the next commit
    data = job.task.load_data()
    batches = TrainBatches(data, batch_size=settings.batch_size, epochs=settings.epochs, seed=settings.seed)
    identity = {**job.identity, "data": _counts(data)}
    checkpoints = Checkpoints(job.folder.checkpoint, every_seconds=job.checkpoint_seconds)
    saved = checkpoints.read()
    if saved is not None:
        check_same_run(checkpoints.path, saved["run"], identity)
    steps_made = 0 if saved is None else position_in(saved, checkpoints.path, batches).step
    method = methods.find(settings.method)
    network = _build_network(job, method, batches)
    step = method.step(network, settings)
    say(_opening(job, batches))
    if saved is not None:
        say(f"resuming at step {steps_made:,} of {len(batches):,}{_differences(saved, job)}")
    with (
        stop_signals() as stop,
        job.folder.locked(job.found),
        MetricsLog(job.folder.metrics, after_step=steps_made) as log,
    ):
        watchers = Watchers(log=log, progress=progress, say=say)
        position = training.train(
            network,
            batches,
            step,
            settings,
            loss=job.task.loss,
            evaluate=lambda net: accuracy(net, data, batch_size=settings.batch_size, workers=settings.workers),
            checkpoints=checkpoints,
            saved=saved,
            watchers=watchers,
            stop=stop,
            identity=identity,
            peak_learning_rate=settings.learning_rate if job.init is None else settings.fine_tune_learning_rate,
            commit=code,
        )
        net, rows = _sizes(job, method, network, data, _stopping(progress, stop))
        _warn_of_statistics(net, settings, say)
        origin = {"commit": code, "started": started, "identity": identity}
        record = {**_record(job, position, rows), **origin}
        net.save(job.folder.network, info=_about(record, data))
        log.write("sizes", position.step, {"sizes": record["sizes"]})
        write_atomically(job.folder.record, (json.dumps(record, indent=1) + "\n").encode())
        checkpoints.path.unlink(missing_ok=True)
    return record


def _warn_of_statistics(net: methods.Sized, settings: Settings, say: Say) -> None:
    """Say where a measured size is too far from those that were calibrated."""
    if not isinstance(net, DecomposedNet):
        return
    contents = net.artifact()
    sizes = [size for size in settings.sizes if size >= net.selector.smallest_size]
    text = next(filter(None, (contents.complaint(contents.of_size(size)) for size in sizes)), None)
    if text is not None:
        say(f"warning: {text}")


def finished(job: Job) -> dict[str, Any] | None:
    """The record, if the run is complete; refuse one of another run."""
    record = job.folder.finished()
    if record is not None:
        check_same_run(job.folder.record, record["identity"], {**job.identity, "data": record["identity"].get("data")})
    return record


def _changed_calibration(job: Job, record: Mapping[str, Any]) -> list[str]:
    """What of the calibration is other now than it was in a finished run, in words."""
    settings = record.get("settings")
    before: Mapping[str, Any] = settings if isinstance(settings, Mapping) else {}
    now = plain_settings(job.settings)
    changed = [key for key in OF_THE_CALIBRATION if before.get(key, now[key]) != now[key]]
    return [f"{key}={now[key]} (was {before[key]})" for key in changed]


def _calibrated_anew(
    job: Job, record: Mapping[str, Any], changed: Sequence[str], *, progress: Report, say: Say
) -> dict[str, Any]:
    """A finished run with other statistics: its network is calibrated and measured again, and trained no further."""
    make_deterministic()
    settings, started, code = job.settings, timestamp(), records.commit()
    net = load(job.folder.network, model=job.task.build_model())
    if not isinstance(net, DecomposedNet) or len(job.variants) > 1:
        raise InvalidArgumentError(
            f"{job.folder.record}: the run is complete, and with method={settings.method} its sizes cannot be "
            f"calibrated anew with {changed[0]}; allowed: the same, or another folder"
        )
    data = job.task.load_data()
    check_same_run(job.folder.record, record["identity"].get("data") or {}, _counts(data))
    before = from_plain(settings, record["settings"])
    say(f"this run is complete; calibrating its network anew with {', '.join(changed)}")
    with (
        stop_signals() as stop,
        job.folder.locked(job.found),
        MetricsLog(job.folder.metrics, after_step=record["steps"]) as log,
    ):
        report = _stopping(progress, stop)
        material = material_for(data, settings, job.task.loss, report)
        decomposing.calibrate_anew_(net.to(job.device), material, settings, before)
        how = {"batch_size": settings.batch_size, "workers": settings.workers}
        rows = measure(net, data, settings.sizes, curve=job.curve, report=report, **how)
        now = plain_settings(settings)
        anew = {"command": _without_folders(job.command), "commit": code, "started": started, "finished": timestamp()}
        record = {
            **record,
            "settings": {**record["settings"], **{key: now[key] for key in OF_THE_SIZES}},
            "sizes": [asdict(row) for row in rows],
            "calibrated_anew": {**anew, "machine": records.machine()},
        }
        net.save(job.folder.network, info=_about(record, data))
        log.write("sizes", record["steps"], {"sizes": record["sizes"]})
        write_atomically(job.folder.record, (json.dumps(record, indent=1) + "\n").encode())
    return record


def _counts(data: Data) -> dict[str, int]:
    return {"train_images": data.train_count, "test_images": data.test_count, "classes": data.classes}


def _without_folders(command: str) -> str:
    return shlex.join(map(records.without_folders, shlex.split(command)))


def _build_network(job: Job, method: methods.Method, batches: TrainBatches) -> nn.Module:
    """What the method trains, where it computes; the model has shown that it can run the data."""
    settings = job.settings
    seed_everything(settings.seed)
    model = job.task.build_model()
    if job.init is not None:
        load_weights_(model, job.init)
    x = _first_pass(model, batches, settings, job.device)
    return method.network(model, x[:1], settings, is_trained=job.init is not None).to(job.device)


def try_out(task: recipes.Task, settings: Settings, device: str) -> None:
    """Load the data and run a batch through the model: what cannot be trained is seen before anything is written."""
    batches = TrainBatches(task.load_data(), batch_size=settings.batch_size, epochs=settings.epochs, seed=settings.seed)
    _first_pass(task.build_model(), batches, settings, device)


def _first_pass(model: nn.Module, batches: TrainBatches, settings: Settings, device: str) -> Tensor:
    """Have the model run a batch where it is going to compute; the inputs come back."""
    data = batches.data
    model.to(device)
    if settings.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if data.test_count < 1:
        raise WrongDataError("data: there are no test images; allowed: at least one")
    x, _ = training.moved(batches[0], torch.device(device), settings)
    try:
        with torch.no_grad():  # not inference mode: what a model keeps from a pass must be fit for training
            outputs = model.eval()(x)
    except Exception as error:  # whatever a model of somebody else raises
        reason = first_line(error)
        hint = "; channels_last=false may help" if settings.channels_last else ""
        raise WrongDataError(f"the model cannot run a batch of shape {tuple(x.shape)}: {reason}{hint}") from error
    check_outputs(outputs, data.classes)
    return x


def _stopping(progress: Report, stop: threading.Event) -> Report:
    """Progress that stops where it was asked to: after training, all that is lost is measured again."""

    def report(line: Progress) -> None:
        if stop.is_set():
            raise Interrupted("stopped after training, before all sizes were measured; --resume does that again")
        progress(line)

    return report


def _sizes(
    job: Job, method: methods.Method, network: nn.Module, data: Data, report: Report
) -> tuple[methods.Sized, list[Row]]:
    """After training: the network at its sizes, and their accuracies; of several variants the first one is kept."""
    settings, first, rows = job.settings, None, []
    variants = job.variants or {job.curve: {}}
    in_turn = InTurn(report, count=len(variants))
    material = material_for(data, settings, job.task.loss, in_turn)
    for curve, overrides in variants.items():
        chosen = with_overrides(settings, overrides)
        net: Any = method.sized(network, material, chosen)
        first = first or net
        rows += measure(
            net,
            data,
            settings.sizes,
            curve=curve,
            batch_size=settings.batch_size,
            workers=settings.workers,
            report=in_turn,
        )
        in_turn.next()
    assert first is not None
    return first, rows


def _record(job: Job, position: Position, rows: list[Row]) -> dict[str, Any]:
    """What was run and what came out."""
    epochs = [line for line in read_metrics(job.folder.metrics) if line.get("kind") == "epoch"]
    return {
        "command": _without_folders(job.command),
        "recipe": job.recipe,
        "settings": plain_settings(job.settings),
        "seed": job.settings.seed,
        "init": None if job.init is None else {"file": job.init.name, "sha256": job.init_sha256},
        "finished": timestamp(),
        "training_commits": position.commits,
        "training_seconds": round(position.seconds, 1),
        "steps": position.step,
        "machine": records.machine(),
        "sizes": [asdict(row) for row in rows],
        "epochs": [{k: v for k, v in line.items() if k not in ("kind", "step")} for line in epochs],
    }


def _about(record: Mapping[str, Any], data: Data) -> dict[str, Any]:
    """What the artifact says of itself: nothing of when and where, so that the same run gives the same bytes."""
    kept = ("recipe", "settings", "seed", "init", "commit", "steps", "sizes")
    x, _ = data.test_batch(torch.arange(1))
    last = record["epochs"][-1] if record["epochs"] else {}
    return {
        **{key: record[key] for key in kept},
        "metrics": {key: value for key, value in last.items() if key != "seconds"},
        "test_images": data.test_count,
        "classes": data.classes,
        "input_shape": list(x.shape[1:]),
    }


def material_for(data: Data, settings: Settings, loss: Loss, progress: Report) -> methods.Material:
    """What the sizes of a trained network are made with."""
    x, _ = data.test_batch(torch.arange(1))
    count = min(settings.calibration_images, data.train_count)
    images = TrainBatches(data, batch_size=min(125, count), epochs=1, seed=settings.seed + 2**31)
    calibration = _FirstBatches(images, count)
    return methods.Material(example_input=x, calibration=calibration, loss=loss, progress=progress)


class _FirstBatches:
    """The first so many images of an epoch, augmented as in training."""

    def __init__(self, batches: TrainBatches, images: int) -> None:
        self.batches = batches
        self.count = min(len(batches), -(-images // batches.batch_size))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        return (self.batches[number] for number in range(self.count))


def _opening(job: Job, batches: TrainBatches) -> str:
    start = f"from {job.init.name}" if job.init is not None else "from scratch"
    data = batches.data
    return (
        f"{job.recipe}: method {job.settings.method}, {start}; {data.train_count:,} training and "
        f"{data.test_count:,} test images; epochs: {batches.epochs}, of {batches.per_epoch:,} steps; on {job.device}"
    )


def _differences(saved: Mapping[str, Any], job: Job) -> str:
    """What makes the last bits differ from those of a run that was not cut off."""
    now = bits_depend_on(job.device)
    then = saved["bits_depend_on"]
    different = [f"{k} {one_line(then[k], 80)}, now {now[k]}" for k in now if k in then and then[k] != now[k]]
    return f" (begun with {', '.join(different)}: the last bits may differ)" if different else ""
