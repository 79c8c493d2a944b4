"""After training: the network at its sizes, measured, in one file, and the record of the run beside it.

A finished run whose settings of the calibration have changed gets other statistics, and no training.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from decomposable.data.base import Data, TrainBatches
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.loading import load
from decomposable.progress import InTurn, Progress, Report
from decomposable.recipes.settings import Settings
from decomposable.training import methods, records
from decomposable.training.checkpoint import Position
from decomposable.training.devices import make_deterministic
from decomposable.training.divergence import Loss
from decomposable.training.evaluation import Row, measure
from decomposable.training.loop import Say
from decomposable.training.methods import decomposing
from decomposable.training.methods.flat import from_plain, with_overrides
from decomposable.training.metrics import MetricsLog, read_metrics
from decomposable.training.runs import OF_THE_CALIBRATION, OF_THE_SIZES, Job, RunFolder, check_same_run, plain_settings
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.files import write_atomically
from decomposable_edge.interrupts import Interrupted, stop_signals
from decomposable_edge.machine import timestamp


def at_its_sizes(
    job: Job, method: methods.Method, network: nn.Module, data: Data, report: Report
) -> tuple[methods.Sized, list[Row]]:
    """Return the network at its sizes, the first one if there are variants, and the accuracies of all of them."""
    first, rows = None, []
    variants = job.variants or {job.curve: {}}
    in_turn = InTurn(report, count=len(variants))
    material = calibration_data_for(data, job.settings, job.task.loss, in_turn)
    for curve, overrides in variants.items():
        net = method.sized(network, material, with_overrides(job.settings, overrides))
        first = first or net
        rows += measure(net, data, job.settings, curve=curve, report=in_turn)
        in_turn.next()
    assert first is not None
    return first, rows


def warn_of_statistics(net: methods.Sized, settings: Settings, say: Say) -> None:
    """Say if a measured size is too far from those that were calibrated."""
    if not isinstance(net, DecomposedNet):
        return
    contents = net.artifact()
    sizes = [size for size in settings.sizes if size >= net.selector.smallest_size]
    text = next(filter(None, (contents.calibration_warning(contents.of_size(size)) for size in sizes)), None)
    if text is not None:
        say(f"warning: {text}")


def stopping(progress: Report, stop: threading.Event) -> Report:
    """Return a report that stops when it was asked to: after training, all that is lost is measured again."""

    def report(line: Progress) -> None:
        if stop.is_set():
            raise Interrupted("stopped after training, before all sizes were measured; --resume does that again")
        progress(line)

    return report


def calibration_data_for(data: Data, settings: Settings, loss: Loss, progress: Report) -> methods.CalibrationData:
    """Return what the sizes of a trained network are made with.

    Its batches are the first of an epoch, augmented, and whole: one of a few images would have other statistics.
    """
    x, _ = data.test_batch(torch.arange(1))
    images = min(settings.calibration_images, data.train_count)
    size = min(125, images)
    batches = TrainBatches(data, batch_size=size, epochs=1, seed=settings.seed + 2**31, most=-(-images // size))
    return methods.CalibrationData(
        example_input=x,
        calibration=batches,
        calibration_images=len(batches) * size,
        loss=loss,
        progress=progress,
    )


def record_of(job: Job, position: Position, rows: list[Row]) -> dict[str, Any]:
    """Return what was run and what came out."""
    epochs = [line for line in read_metrics(job.folder.metrics) if line.get("kind") == "epoch"]
    return {
        "command": records.command_without_folders(job.command),
        "recipe": job.recipe,
        "settings": plain_settings(job.settings),
        "seed": job.settings.seed,
        "init": None if job.init is None else {"file": job.init.name, "sha256": job.init_sha256},
        "finished": timestamp(),
        "training_commits": position.commits,
        "training_seconds": round(position.seconds, 1),
        "steps": position.step,
        "machine": records.machine(),
        "sizes": [row.as_dict() for row in rows],
        "epochs": [{k: v for k, v in line.items() if k not in ("kind", "step")} for line in epochs],
    }


def described(data: Data) -> dict[str, Any]:
    """Return what a file says of the data that its accuracies were measured with."""
    x, _ = data.test_batch(torch.arange(1))
    return {"test_images": data.test_count, "classes": data.classes, "input_shape": list(x.shape[1:])}


def keep(net: methods.Sized, record: Mapping[str, Any], folder: RunFolder, data: Data, log: MetricsLog) -> None:
    """Write the network and, last, the record, with which the run is complete.

    The network says nothing of when and where it was made, so that the same run gives the same bytes.
    """
    about = {key: record[key] for key in ("recipe", "settings", "seed", "init", "commit", "steps", "sizes")}
    last = record["epochs"][-1] if record["epochs"] else {}
    about["metrics"] = {key: value for key, value in last.items() if key != "seconds"}
    # Without a graph for devices, which takes seconds: `decomposable export --any-size` makes it when it is wanted.
    contents = net.artifact() if isinstance(net, DecomposedNet) else net
    contents.save(folder.network, info=about | described(data))
    log.write("sizes", record["steps"], {"sizes": record["sizes"]})
    write_atomically(folder.record, (json.dumps(record, indent=1) + "\n").encode())


def counts(data: Data) -> dict[str, int]:
    """Return how much data there is: a run that goes on has to have as much."""
    return {"train_images": data.train_count, "test_images": data.test_count, "classes": data.classes}


def changed_calibration(job: Job, record: Mapping[str, Any]) -> list[str]:
    """Return which settings of the calibration are others than in a finished run, in words."""
    settings = record.get("settings")
    before: Mapping[str, Any] = settings if isinstance(settings, Mapping) else {}
    now = plain_settings(job.settings)
    changed = [key for key in OF_THE_CALIBRATION if before.get(key, now[key]) != now[key]]
    return [f"{key}={now[key]} (was {before[key]})" for key in changed]


def calibrate_anew(
    job: Job, record: Mapping[str, Any], changed: Sequence[str], *, progress: Report, say: Say
) -> dict[str, Any]:
    """Calibrate and measure the network of a finished run again, with no further training; return the new record."""
    make_deterministic()
    settings, started, code = job.settings, timestamp(), records.commit()
    if not methods.find(settings.method).decomposes or len(job.variants) > 1:
        why = f"the run is complete, and with method={settings.method} its sizes cannot be calibrated anew"
        text = f"{job.folder.record}: {why} with {changed[0]}; allowed: the same, or another folder"
        raise InvalidArgumentError.about(changed[0].partition("=")[0], changed[0], "the same, or another folder", text)
    net = load(job.folder.network, model=job.task.build_model())
    data = job.task.load_data()
    check_same_run(job.folder.record, record["identity"].get("data") or {}, counts(data))
    before = from_plain(settings, record["settings"])
    say(f"this run is complete; calibrating its network anew with {', '.join(changed)}")
    with stop_signals() as stop, job.folder.locked(), MetricsLog(job.folder.metrics, after_step=record["steps"]) as log:
        report = stopping(progress, stop)
        material = calibration_data_for(data, settings, job.task.loss, report)
        decomposing.calibrate_anew_(net.to(job.device), material, settings, before)
        rows = measure(net, data, settings, curve=job.curve, report=report)
        now = plain_settings(settings)
        record = {
            **record,
            "settings": {**record["settings"], **{key: now[key] for key in OF_THE_SIZES}},
            "sizes": [row.as_dict() for row in rows],
            "calibrated_anew": {
                "command": records.command_without_folders(job.command),
                "commit": code,
                "started": started,
                "finished": timestamp(),
                "machine": records.machine(),
            },
        }
        keep(net, record, job.folder, data, log)
    return record
