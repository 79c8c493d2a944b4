"""From a recipe to a network of any size: train, decompose, calibrate, measure, and keep everything in one folder.

RUN/checkpoint.pt          to go on from; removed when all is done
RUN/metrics.jsonl          a line per epoch, and per 50 steps
RUN/network.safetensors    the artifact: every size, with batch normalisation statistics
RUN/record.json            settings, seed, commit, machine, sizes and accuracies
"""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decomposable import methods, recipes, records, training
from decomposable.checkpoint import Checkpoints, seed_everything
from decomposable.data.base import Data, TrainBatches
from decomposable.errors import InvalidArgumentError
from decomposable.evaluation import accuracy, check_outputs, measure
from decomposable.files import write_atomically
from decomposable.metrics import MetricsLog, read_metrics
from decomposable.network import DecomposedNet, decompose
from decomposable.settings import Settings, with_overrides
from decomposable.training import Position, Say, Watchers
from decomposable.weights import load_weights_, sha256

CHECKPOINT, METRICS, NETWORK, RECORD = "checkpoint.pt", "metrics.jsonl", "network.safetensors", "record.json"
WITHOUT_EFFECT = ("workers", "evaluate_every", "calibration_images", "calibrated_sizes", "sizes")
"""Settings that do not change the weights, so that a run may be resumed with others."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training: a recipe, its settings, and where things are."""

    recipe: str
    settings: Settings
    task: recipes.Task
    out: Path
    init: Path | None = None
    device: str = "cpu"
    checkpoint_seconds: float = 60.0
    command: str = ""

    @property
    def identity(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one that was cut off."""
        return {
            "recipe": self.recipe,
            "init": None if self.init is None else sha256(self.init),
            **{k: v for k, v in asdict(self.settings).items() if k not in WITHOUT_EFFECT},
        }


def train(
    recipe: str | recipes.Recipe,
    *,
    out: Path | str,
    data: Path | str | None = None,
    init: Path | str | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Say = lambda text: None,
    say: Say = lambda text: None,
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
        progress: called with a line about the step under way.
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
        overrides=settings,
    )
    return run(job, progress=progress, say=say)


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
) -> Job:
    """Check everything that can be checked before anything is written."""
    function = recipes.find(recipe) if isinstance(recipe, str) else recipe
    name = recipe if isinstance(recipe, str) else f"{function.__module__}:{function.__qualname__}"
    chosen = with_overrides(settings or recipes.default_settings(function), overrides or {})
    methods.check(chosen.method)
    job = Job(
        recipe=name,
        settings=chosen,
        task=recipes.make_task(function, data, chosen),
        out=out,
        init=init,
        device=choose_device(device),
        checkpoint_seconds=checkpoint_seconds,
        command=command,
    )
    if not checkpoint_seconds >= 0:
        raise InvalidArgumentError(f"--checkpoint-seconds {checkpoint_seconds:g}; allowed: a number of at least 0")
    if out.exists() and not out.is_dir():
        raise InvalidArgumentError(f"--out {out}: it is a file; allowed: a folder")
    if not resume and any((out / file).exists() for file in (CHECKPOINT, METRICS, NETWORK, RECORD)):
        raise InvalidArgumentError(f"--out {out}: there is a run in it; allowed: --resume to go on, or another folder")
    return job


def run(job: Job, *, progress: Say = lambda text: None, say: Say = lambda text: None) -> dict[str, Any]:
    """Train where that is not done yet, then make the artifact and the record; the record comes back."""
    if (job.out / RECORD).exists() and (job.out / NETWORK).exists():
        record: dict[str, Any] = json.loads((job.out / RECORD).read_text())
        _check_same_run(job, record)
        (job.out / CHECKPOINT).unlink(missing_ok=True)  # where the run was killed in its very last moment
        say("this run is complete; nothing to do")
        return record
    settings, started = job.settings, records.now()
    code = records.commit()  # before the run: it may end after the next commit
    data = job.task.load_data()
    batches = TrainBatches(data, batch_size=settings.batch_size, epochs=settings.epochs, seed=settings.seed)
    model = _build_model(job, data)
    job.out.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(job.out / CHECKPOINT, every_seconds=job.checkpoint_seconds)
    say(_opening(job, data, batches))
    saved = checkpoints.read()
    if saved is not None:
        say(f"resuming at step {saved['position']['step']:,} of {len(batches):,}{_other_machine(saved)}")
    with MetricsLog(job.out / METRICS, after_step=0 if saved is None else saved["position"]["step"]) as log:
        watchers = Watchers(log=log, progress=progress, say=say)
        position = training.train(
            model,
            batches,
            methods.build(model, settings),
            settings,
            loss=job.task.loss,
            evaluate=lambda net: accuracy(net, data, workers=settings.workers),
            checkpoints=checkpoints,
            watchers=watchers,
            run_identity=job.identity,
            peak_learning_rate=settings.learning_rate if job.init is None else settings.fine_tune_learning_rate,
            commit=code,
        )
        record = _finish(job, model, data, position, watchers, {"commit": code, "started": started})
    checkpoints.path.unlink(missing_ok=True)
    return record


def _build_model(job: Job, data: Data) -> nn.Module:
    settings = job.settings
    seed_everything(settings.seed)
    model = job.task.build_model()
    if job.init is not None:
        load_weights_(model, job.init)
    model.to(job.device)
    if settings.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, _ = data.test_batch(torch.arange(1))
    with torch.inference_mode():
        check_outputs(tuple(model.eval()(x.to(job.device)).shape), data.classes)
    return model


def _finish(
    job: Job, model: nn.Module, data: Data, position: Position, watchers: Watchers, origin: Mapping[str, Any]
) -> dict[str, Any]:
    """After training: every size of the network, its accuracies, the artifact and the record."""
    settings = job.settings
    net = decomposed(model, data, settings, watchers.progress)
    rows = measure(net, data, feasible(net, settings.sizes), workers=settings.workers, report=watchers.progress)
    epochs = [line for line in read_metrics(job.out / METRICS) if line["kind"] == "epoch"]
    record = {
        "command": shlex.join(map(records.without_folders, shlex.split(job.command))),
        "recipe": job.recipe,
        "settings": asdict(settings),
        "seed": settings.seed,
        "init": None if job.init is None else {"file": job.init.name, "sha256": sha256(job.init)},
        **origin,
        "finished": records.now(),
        "training_commits": position.commits,
        "training_seconds": round(position.seconds, 1),
        "steps": position.step,
        "machine": records.machine(),
        "test_images": data.test_count,
        "sizes": [asdict(row) for row in rows],
        "epochs": [{k: v for k, v in line.items() if k not in ("kind", "step")} for line in epochs],
    }
    net.save(job.out / NETWORK, info=_about(record, data))
    record["network"] = {"file": NETWORK, "bytes": (job.out / NETWORK).stat().st_size}
    watchers.log.write("sizes", position.step, {"sizes": record["sizes"]})
    write_atomically(job.out / RECORD, (json.dumps(record, indent=1) + "\n").encode())
    return record


def _about(record: Mapping[str, Any], data: Data) -> dict[str, Any]:
    """What the artifact says of itself: nothing of when and where, so that the same run gives the same bytes."""
    kept = ("recipe", "settings", "seed", "init", "commit", "steps", "test_images", "sizes")
    x, _ = data.test_batch(torch.arange(1))
    last = record["epochs"][-1] if record["epochs"] else {}
    return {
        **{key: record[key] for key in kept},
        "metrics": {key: value for key, value in last.items() if key != "seconds"},
        "classes": data.classes,
        "input_shape": list(x.shape[1:]),
    }


def decomposed(model: nn.Module, data: Data, settings: Settings, progress: Say) -> DecomposedNet:
    """The trained model, decomposed, with batch normalisation statistics for a grid of sizes."""
    progress("decomposing")
    x, _ = data.test_batch(torch.arange(1))
    net = decompose(
        model.eval(), example_input=x, form=settings.form, criterion=settings.criterion, min_rank=settings.min_rank
    )
    count = min(settings.calibration_images, data.train_count)
    images = TrainBatches(data, batch_size=min(125, count), epochs=1, seed=settings.seed + 2**31)
    loader = _FirstBatches(images, count, progress)
    sizes = feasible(net, settings.calibrated_sizes) or None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it takes long: progress says so
        net.calibrate_(loader, sizes=sizes)
    return net


class _FirstBatches:
    """The first so many images of an epoch, augmented as in training, telling how far it is."""

    def __init__(self, batches: TrainBatches, images: int, progress: Say) -> None:
        self.batches, self.progress = batches, progress
        self.count = min(len(batches), -(-images // batches.batch_size))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.count):
            self.progress(f"calibrating: batch {number + 1} of {self.count}")
            yield self.batches[number][0]


def feasible(net: DecomposedNet, sizes: tuple[float, ...]) -> list[float]:
    """Those sizes that the network can have."""
    return [size for size in sizes if size >= net.selector.smallest_size]


def choose_device(name: str) -> str:
    """The device by its name; auto is the GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InvalidArgumentError(
            f"--device {name}: {str(error).splitlines()[0]}; allowed: auto, cpu, cuda …"
        ) from error
    return name


def _opening(job: Job, data: Data, batches: TrainBatches) -> str:
    start = f"from {job.init.name}" if job.init is not None else "from scratch"
    return (
        f"{job.recipe}: method {job.settings.method}, {start}; {data.train_count:,} training and "
        f"{data.test_count:,} test images; epochs: {batches.epochs}, of {batches.per_epoch:,} steps; on {job.device}"
    )


def _other_machine(saved: Mapping[str, Any]) -> str:
    """What makes the last bits differ."""
    if saved["torch_version"] != torch.__version__:
        return f" (begun with PyTorch {saved['torch_version']}: the last bits may differ)"
    if saved["threads"] != torch.get_num_threads():
        return f" (begun with {saved['threads']} threads, now {torch.get_num_threads()}: the last bits may differ)"
    return ""


def _check_same_run(job: Job, record: Mapping[str, Any]) -> None:
    ours = json.loads(json.dumps(asdict(job.settings)))
    for name in (f.name for f in fields(job.settings)):
        if record["settings"].get(name) != ours[name]:
            raise InvalidArgumentError(
                f"--out {job.out}: it holds a finished run with {name}={record['settings'].get(name)}, "
                f"now it is {ours[name]}; allowed: another folder"
            )
