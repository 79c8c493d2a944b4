"""A finished run whose settings of the calibration have changed: its network gets other statistics, and no training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from decomposable.errors import InvalidArgumentError
from decomposable.interrupts import stop_signals
from decomposable.machine import timestamp
from decomposable.methods import decomposing
from decomposable.methods.loading import load
from decomposable.methods.settings import from_plain
from decomposable.network.decomposed import DecomposedNet
from decomposable.progress import Report
from decomposable.training import records
from decomposable.training.devices import make_deterministic
from decomposable.training.evaluation import measure
from decomposable.training.finishing import counts, keep, material_for, stopping
from decomposable.training.job import OF_THE_CALIBRATION, OF_THE_SIZES, Job, plain_settings
from decomposable.training.loop import Say
from decomposable.training.metrics import MetricsLog
from decomposable.training.runs import check_same_run


def changed_calibration(job: Job, record: Mapping[str, Any]) -> list[str]:
    """What of the calibration is other now than it was in a finished run, in words."""
    settings = record.get("settings")
    before: Mapping[str, Any] = settings if isinstance(settings, Mapping) else {}
    now = plain_settings(job.settings)
    changed = [key for key in OF_THE_CALIBRATION if before.get(key, now[key]) != now[key]]
    return [f"{key}={now[key]} (was {before[key]})" for key in changed]


def calibrate_anew(
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
    check_same_run(job.folder.record, record["identity"].get("data") or {}, counts(data))
    before = from_plain(settings, record["settings"])
    say(f"this run is complete; calibrating its network anew with {', '.join(changed)}")
    with (
        stop_signals() as stop,
        job.folder.locked(job.found),
        MetricsLog(job.folder.metrics, after_step=record["steps"]) as log,
    ):
        report = stopping(progress, stop)
        material = material_for(data, settings, job.task.loss, report)
        decomposing.calibrate_anew_(net.to(job.device), material, settings, before)
        how = {"batch_size": settings.batch_size, "workers": settings.workers}
        rows = measure(net, data, settings.sizes, curve=job.curve, report=report, **how)
        now = plain_settings(settings)
        anew = {
            "command": records.command_without_folders(job.command),
            "commit": code,
            "started": started,
            "finished": timestamp(),
        }
        record = {
            **record,
            "settings": {**record["settings"], **{key: now[key] for key in OF_THE_SIZES}},
            "sizes": [asdict(row) for row in rows],
            "calibrated_anew": {**anew, "machine": records.machine()},
        }
        keep(net, record, job.folder, data, log)
    return record
