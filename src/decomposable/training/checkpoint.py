"""Everything that a run needs to go on exactly where it was, in one file that is replaced as a whole.

The file is of the same make as a network's (`storage/container.py`): safetensors with a description in JSON, no pickle,
and SHA-256 checksums over all of it, so that a bit that has changed anywhere is found before anything is gone on with.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decomposable.errors import ArtifactError, DecomposableError
from decomposable.fields import require
from decomposable.network.file.container import open_container, write_container
from decomposable.training.packing import pack, unpack

VERSION = 2
"""The version of what is in a checkpoint. (Version 1, a pickle without a checksum, was never released.)"""
_ENTRIES = ("random", "run", "position", "model", "optimizer", "method", "bits_depend_on")
_KIND = "checkpoint"


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
        tensors: dict[str, Tensor] = {}
        content = {name: pack(value, tensors, name) for name, value in {"random": random_state(), **state}.items()}
        try:
            write_container(self.path, {"kind": _KIND, "version": VERSION, "content": content}, tensors)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written (is the disk full?); the one before is kept: {error}"
            ) from error
        self._written = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """The last one; None where there is none yet."""
        return read_checkpoint(self.path) if self.path.exists() else None


def is_checkpoint(path: Path) -> bool:
    """Whether a file of this package is one."""
    with open_container(path) as container:
        return container.description.get("kind") == _KIND


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, all of it verified."""
    _refuse_earlier_version(path)
    try:
        with open_container(path) as container:
            _require_checkpoint(container.description)
            tensors = container.read_all()
            content = container.description["content"]
            require(isinstance(content, dict), "its content is not an object")
            state = {name: unpack(value, tensors) for name, value in content.items()}
    except (ArtifactError, RecursionError) as error:
        reason = error.reason if isinstance(error, ArtifactError) else None
        raise CheckpointError(f"{path} is no checkpoint: {reason or error}") from error
    for name in _ENTRIES:
        if not isinstance(state.get(name), dict):
            raise CheckpointError(f"{path} is no checkpoint: it has no {name}")
    return state


def _refuse_earlier_version(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            raise CheckpointError(
                f"{path} is a checkpoint without a checksum, of an earlier version, or none; allowed: another folder "
                "(with --init one can go on from the weights of this file)"
            )


def _require_checkpoint(description: Mapping[str, Any]) -> None:
    kind, version = description.get("kind"), description.get("version")
    require(kind == _KIND, f"it holds a {kind!r:.40}")
    require(type(version) is int and version == VERSION, f"it is of version {version!r:.40}, this is {VERSION}")
    require("content" in description, "it has no content")


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
    _check_numpy(*state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002


def _check_numpy(kind: object, keys: object, place: object, *_: object) -> None:
    """Numpy itself takes any place, and then reads there."""
    is_keys = isinstance(keys, Tensor) and keys.shape == (624,) and keys.dtype == torch.int64
    if kind != "MT19937" or not is_keys or type(place) is not int or not 0 <= place <= 624:
        raise ValueError("the state of numpy's generator is not one")


def seed_everything(seed: int) -> None:
    """Start all of them from one seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
