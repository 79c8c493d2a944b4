"""The folder of a run: its files, one run at a time in it, and whether a run is the one that was begun there.

RUN/checkpoint.pt          to go on from; removed when all is done
RUN/metrics.jsonl          a line per epoch, and per 50 steps
RUN/network.safetensors    the artifact: every size, with batch normalisation statistics
RUN/record.json            settings, seed, commit, machine, sizes and accuracies
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decomposable.errors import DecomposableError, InvalidArgumentError
from decomposable.files import sweep

with suppress(ImportError):  # not on Windows, where two runs in one folder are not noticed
    import fcntl


class RunError(DecomposableError):
    """The folder of a run is not what it should be."""


@dataclass(frozen=True)
class RunFolder:
    """Where the files of a run are."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        """To go on from."""
        return self.path / "checkpoint.pt"

    @property
    def metrics(self) -> Path:
        """What was seen on the way."""
        return self.path / "metrics.jsonl"

    @property
    def network(self) -> Path:
        """Every size."""
        return self.path / "network.safetensors"

    @property
    def record(self) -> Path:
        """What was run and what came out; written last, so that a run with a record is complete."""
        return self.path / "record.json"

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them."""
        return self.checkpoint, self.metrics, self.network, self.record

    def check(self, *, resume: bool) -> None:
        """Refuse a folder that is none, or that holds a run which is not to be resumed."""
        if self.path.exists() and not self.path.is_dir():
            raise InvalidArgumentError(f"--out {self.path}: it is a file; allowed: a folder")
        if not resume and any(file.exists() for file in self.files):
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
                f"{self.record}: it is not JSON; remove it to make it again, or choose another --out"
            ) from error
        if not isinstance(record, dict) or not isinstance(record.get("identity"), dict):
            raise RunError(f"{self.record}: it is not the record of a run; choose another --out")
        if not self.network.exists():
            raise RunError(f"{self.path}: the run is complete, but {self.network.name} is gone; choose another --out")
        return record

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and hold it: a second run in it would mix its files with the first one's."""
        self.path.mkdir(parents=True, exist_ok=True)
        if "fcntl" not in globals():
            yield
            return
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError(f"--out {self.path}: another process is running in it") from error
            for file in self.files:
                sweep(file)
            yield
        finally:
            os.close(handle)


def check_same_run(where: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse to go on with anything else than what a run was begun with."""
    for key in {**theirs, **ours}:
        if theirs.get(key) != ours.get(key):
            raise InvalidArgumentError(
                f"{where}: the run has {key}={theirs.get(key)}, now it is {ours.get(key)}; allowed: the same, or "
                "another folder (with --init one can go on from this one's weights)"
            )
