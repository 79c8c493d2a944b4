"""The folder of a run: its files, one run at a time in it, and whether a run is the one that was begun there.

RUN/checkpoint.pt          to go on from; removed when all is done
RUN/metrics.jsonl          a line per epoch, and per 50 steps
RUN/network.safetensors    the artifact: every size, with batch normalisation statistics
RUN/record.json            settings, seed, commit, machine, sizes and accuracies
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from decomposable.errors import DecomposableError, InvalidArgumentError
from decomposable.files import sweep
from decomposable.locks import lock_file, unlock_file


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

    def check(self, *, resume: bool) -> None:
        """Refuse a folder that is none, or that holds a run which is not to be resumed."""
        if self.path.exists() and not self.path.is_dir():
            raise InvalidArgumentError(f"--out {self.path}: it is a file; allowed: a folder")
        if not resume and any(file.exists() for file in (self.checkpoint, self.metrics, self.network, self.record)):
            raise InvalidArgumentError(
                f"--out {self.path}: there is a run in it; allowed: --resume to go on, or another folder"
            )

    def finished(self) -> dict[str, Any] | None:
        """The record, if the run is complete."""
        if not self.record.exists():
            return None
        try:
            record = json.loads(self.record.read_text())
        except (ValueError, UnicodeDecodeError) as error:
            raise RunError(
                f"{self.record}: it is not JSON", "remove it to make it again, or choose another --out"
            ) from error
        parts = {"identity": dict, "sizes": list, "epochs": list}
        if not isinstance(record, dict) or not all(isinstance(record.get(k), kind) for k, kind in parts.items()):
            raise RunError(f"{self.record}: it is not the record of a run", "choose another --out")
        if not self.network.exists():
            raise RunError(f"{self.path}: the run is complete, but {self.network.name} is gone", "choose another --out")
        return record

    @property
    def state(self) -> tuple[Any, ...]:
        """Something that changes when a run begins, goes on or ends here."""
        files = [file.stat() if file.exists() else None for file in (self.checkpoint, self.network, self.record)]
        return tuple(None if file is None else (file.st_mtime_ns, file.st_ino) for file in files)

    @contextmanager
    def locked(self, found: tuple[Any, ...]) -> Iterator[None]:
        """Make the folder and hold it: a second run in it would mix its files with the first one's.

        `found` is the state in which it was looked at; what was decided then must still be true.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with held(self.path):
            if self.state != found:
                raise RunError(f"--out {self.path}: another process has just been running in it", "start again")
            sweep(self.path)
            yield


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep others that do the same out of a folder, which must exist; where there are no locks, nothing does."""
    try:
        handle = lock_file(folder, wait=False)
    except BlockingIOError as error:
        raise RunError(f"--out {folder}: another process is running in it") from error
    try:
        yield
    finally:
        unlock_file(handle)


def check_same_run(where: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse to go on with anything else than what a run was begun with."""
    for key in {**theirs, **ours}:
        old, new = theirs.get(key), ours.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            check_same_run(where, old, new)
        elif old != new:
            raise OtherRunError(
                f"{where}: the run has {key}={old}, now it is {new}",
                "the same, or another folder (with --init one can go on from this one's weights)",
            )
