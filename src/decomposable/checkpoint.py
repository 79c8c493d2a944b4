"""Everything that a run needs to go on exactly where it was, in one file that is replaced as a whole."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decomposable.errors import DecomposableError
from decomposable.files import load_plain, replacing

FORMAT = 1
_ENTRIES = ("random", "run", "position", "model", "optimizer", "method", "bits_depend_on")


class CheckpointError(DecomposableError):
    """A checkpoint cannot be read, or is of another run."""


class Checkpoints:
    """The checkpoint of one run, and when the next one is due."""

    def __init__(self, path: Path, *, every_seconds: float) -> None:
        self.path, self.every_seconds = path, every_seconds
        self._written = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the time has come to write one."""
        return time.monotonic() - self._written >= self.every_seconds

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint; a crash in between leaves the old one."""
        try:
            with replacing(self.path) as unfinished:
                torch.save({"format": FORMAT, "random": random_state(), **state}, unfinished)
        except RuntimeError as error:
            if "inline_container" not in str(error):  # what torch's writer says where a disk is full
                raise
            raise CheckpointError(
                f"{self.path} cannot be written (is the disk full?); the one before is kept"
            ) from error
        self._written = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """The last one; None where there is none yet."""
        if not self.path.exists():
            return None
        try:
            state = load_plain(self.path)  # a checkpoint is a pickle, and anybody could have written it
        except ValueError as error:
            raise CheckpointError(f"{self.path} is no checkpoint: {error}") from error
        is_right = isinstance(state, dict) and state.get("format") == FORMAT
        if not is_right or not all(isinstance(state.get(entry), dict) for entry in _ENTRIES):
            raise CheckpointError(f"{self.path} is no checkpoint of this version (format {FORMAT})")
        return state


def random_state() -> dict[str, Any]:
    """The state of every global generator that a model, a loss or a transform may draw from."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put all of them back."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002


def seed_everything(seed: int) -> None:
    """Start all of them from one seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
