"""A run as it was asked for, checked as far as possible before anything is written, and its folder.

A folder holds one run, and only one process runs in it.

RUN/checkpoint.pt          to go on from; removed when all is done
RUN/metrics.jsonl          a line per epoch, and per 50 steps
RUN/network.safetensors    the artifact: every size, with batch normalisation statistics
RUN/record.json            settings, seed, commit, machine, sizes and accuracies
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decomposable import recipes
from decomposable.recipes.settings import Settings
from decomposable.training import methods
from decomposable.training.devices import choose_device
from decomposable.training.methods.flat import flat, with_overrides
from decomposable.training.methods.registry import of_other_methods
from decomposable.training.weights import sha256
from decomposable_edge.errors import DecomposableError, InvalidArgumentError
from decomposable_edge.files import sweep
from decomposable_edge.locks import holding

OF_THE_CALIBRATION = ("calibrated_sizes", "calibrated_alignments", "calibration_images", "calibration_passes")
"""Settings of the statistics: if they have changed, a finished run is calibrated anew, and not trained."""
OF_THE_SIZES = ("sizes", *OF_THE_CALIBRATION)
"""Settings that change what is measured at the end, and nothing of the training."""
WITHOUT_EFFECT = ("workers", "evaluate_every", *OF_THE_SIZES)
"""Settings that do not change the weights, so that a run may be resumed with others."""
LOCK = ".lock"
"""The file that a process holds while it runs in a folder."""
_OF_COMPARISONS = ("compare_", "tuning_")  # settings with these prefixes say which trainings there are


class RunError(DecomposableError):
    """The folder of a run is not what it should be: `what` is wrong, and what to do about it."""

    def __init__(self, what: str, way_out: str = "") -> None:
        super().__init__("; ".join(filter(None, (what, way_out))))
        self.what = what


class OtherRunError(InvalidArgumentError):
    """A folder holds another run than the one that was asked for: `what` is the difference."""

    def __init__(self, what: str, allowed: str) -> None:
        super().__init__(f"{what}; allowed: {allowed}")
        self.what = what


class RunFolder:
    """Where the files of a run are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint.pt"
        self.metrics = path / "metrics.jsonl"
        self.network = path / "network.safetensors"
        self.record = path / "record.json"  # written last, so that a run with a record is complete
        self._found: tuple[Any, ...] = ()  # the state when it was checked

    def check(self, *, resume: bool) -> None:
        """Refuse a folder that is none, or that holds a run which is not to be resumed; it must then stay as it is."""
        if self.path.exists() and not self.path.is_dir():
            raise InvalidArgumentError(f"--out {self.path}: it is a file; allowed: a folder")
        if not resume and any(file.exists() for file in (self.checkpoint, self.metrics, self.network, self.record)):
            raise InvalidArgumentError(
                f"--out {self.path}: there is a run in it; allowed: --resume to go on, or another folder"
            )
        self._found = self._state

    def finished(self, *, needs_network: bool = True) -> dict[str, Any] | None:
        """Return the record if the run is complete, with its network unless that is no longer needed."""
        if not self.record.exists():
            return None
        try:
            record = json.loads(self.record.read_text())
        except ValueError as error:
            raise RunError(
                f"{self.record}: it is not JSON", "remove it to make it again, or choose another --out"
            ) from error
        parts = {"identity": dict, "sizes": list, "epochs": list}
        if not isinstance(record, dict) or not all(isinstance(record.get(k), kind) for k, kind in parts.items()):
            raise RunError(f"{self.record}: it is not the record of a run", "choose another --out")
        if needs_network and not self.network.exists():
            raise RunError(f"{self.path}: the run is complete, but {self.network.name} is gone", "choose another --out")
        return record

    @property
    def _state(self) -> tuple[Any, ...]:
        """Return something that changes when a run begins, goes on or ends here."""
        files = [file.stat() if file.exists() else None for file in (self.checkpoint, self.network, self.record)]
        return tuple(None if file is None else (file.st_mtime_ns, file.st_ino) for file in files)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and hold it, because a second run would mix its files with the first one's.

        Refuse it if it has changed since it was checked.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with held(self.path):
            if self._state != self._found:
                raise RunError(f"--out {self.path}: another process has just been running in it", "start again")
            sweep(self.path)
            yield


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes that do the same out of a folder, which must exist."""
    with ExitStack() as stack:
        try:
            stack.enter_context(holding(folder / LOCK, wait=False))
        except BlockingIOError as error:
            raise RunError(f"--out {folder}: another process is running in it") from error
        yield


def check_same_run(where: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse to go on with anything else than what a run was begun with."""
    for key in {**theirs, **ours}:
        old, new = theirs.get(key), ours.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            check_same_run(where, old, new)
        elif old != new:
            allowed = "the same, or another folder (with --init one can go on from this one's weights)"
            error = OtherRunError(f"{where}: the run has {key}={old}, now it is {new}", allowed)
            error.option, error.came, error.allowed = key, new, f"{key}={old}"
            raise error


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training: a recipe, its settings, and where things are."""

    recipe: str
    settings: Settings
    task: recipes.Task
    folder: RunFolder
    init: Path | None = None
    init_sha256: str | None = None
    device: str = "cpu"
    checkpoint_seconds: float = 60.0
    command: str = ""
    curve: str = ""  # the name of the result, if there is something to tell it from
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # several ways to make sizes of it

    @property
    def identity(self) -> dict[str, Any]:
        """Return what a run that goes on must have in common with the one that was cut off."""
        without_effect = {*WITHOUT_EFFECT, *of_other_methods(self.settings.method)}
        settings = {
            key: value
            for key, value in plain_settings(self.settings).items()
            if key not in without_effect and not key.startswith(_OF_COMPARISONS)
        }
        return {"recipe": self.recipe, "init": self.init_sha256, "settings": settings}


def plain_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings as JSON gives them back, so that those of a record and of a checkpoint are the same."""
    try:
        return json.loads(json.dumps(flat(settings), default=str, allow_nan=False))
    except ValueError as error:
        raise InvalidArgumentError(f"settings: they cannot be stored ({error}); allowed: numbers and text") from error


def prepare(
    recipe: str | recipes.Recipe,
    *,
    out: Path | str,
    data: Path | str | None = None,
    settings: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    init: Path | str | None = None,
    resume: bool = False,
    device: str = "auto",
    **how: Any,
) -> Job:
    """Check everything that can be checked before anything is written; `how` has other fields of the job."""
    function, name = recipes.resolved(recipe)
    chosen = with_overrides(settings or recipes.default_settings(function), overrides or {})
    methods.find(chosen.method).check(chosen, has_init=init is not None)
    check_seconds(how.get("checkpoint_seconds", 0.0))
    folder, init = RunFolder(Path(out)), None if init is None else Path(init)
    folder.check(resume=resume)
    plain_settings(chosen)  # what cannot be stored is refused
    return Job(
        recipe=name,
        settings=chosen,
        task=recipes.make_task(function, None if data is None else Path(data), chosen),
        folder=folder,
        init=init,
        init_sha256=None if init is None else sha256(init),  # now: the file may be gone or another when the run ends
        device=choose_device(device),
        **how,
    )


def check_seconds(checkpoint_seconds: float) -> None:
    """Refuse a time between checkpoints that is none."""
    if not checkpoint_seconds >= 0:
        raise InvalidArgumentError(f"--checkpoint-seconds {checkpoint_seconds:g}; allowed: a number of at least 0")


def finished(job: Job, *, needs_network: bool = True) -> dict[str, Any] | None:
    """Return the record if the run is complete; refuse one of another run."""
    record = job.folder.finished(needs_network=needs_network)
    if record is not None:
        check_same_run(job.folder.record, record["identity"], {**job.identity, "data": record["identity"].get("data")})
    return record
