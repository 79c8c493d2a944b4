"""One training as it was asked for: everything that can be checked before anything is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decomposable import methods, recipes
from decomposable.errors import InvalidArgumentError
from decomposable.methods.registry import of_other_guests
from decomposable.methods.settings import Settings, flat, with_overrides
from decomposable.training.devices import choose_device
from decomposable.training.runs import RunFolder, check_same_run
from decomposable.training.weights import sha256

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
    function, name = recipes.resolved(recipe)
    chosen = with_overrides(settings or recipes.default_settings(function), overrides or {})
    methods.find(chosen.method).check(chosen, has_init=init is not None)
    check_seconds(checkpoint_seconds)
    folder = RunFolder(out)
    folder.check(resume=resume)
    plain_settings(chosen)  # what cannot be stored is refused
    return Job(
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


def check_seconds(checkpoint_seconds: float) -> None:
    """Refuse a time between checkpoints that is none."""
    if not checkpoint_seconds >= 0:
        raise InvalidArgumentError(f"--checkpoint-seconds {checkpoint_seconds:g}; allowed: a number of at least 0")


def finished(job: Job) -> dict[str, Any] | None:
    """The record, if the run is complete; refuse one of another run."""
    record = job.folder.finished()
    if record is not None:
        check_same_run(job.folder.record, record["identity"], {**job.identity, "data": record["identity"].get("data")})
    return record
