"""Everything that a run needs to go on exactly where it was, in one file that is replaced as a whole.

The file is of the same make as a network's (`network/file/container.py`): safetensors with a description in JSON, no
pickle, and SHA-256 checksums over all of it, so that a bit that has changed anywhere is found before anything is gone
on with. The state is a tree, written as JSON and a flat list of tensors: dicts, whose keys are text or whole numbers,
lists, tuples, numbers, text, None and tensors come back as what they were; anything else is refused when it is written.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decomposable.errors import ArtifactError, DecomposableError, InvalidArgumentError
from decomposable.fields import Damaged, require
from decomposable.network.file.container import open_container, write_container
from decomposable.network.file.header import DTYPES

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
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            raise CheckpointError(
                f"{path} is a checkpoint without a checksum, of an earlier version, or none; allowed: another folder "
                "(with --init one can go on from the weights of this file)"
            )
    try:
        with open_container(path) as container:
            kind, version = map(container.description.get, ("kind", "version"))
            require(kind == _KIND, f"it holds a {kind!r:.40}")
            require(type(version) is int and version == VERSION, f"it is of version {version!r:.40}, this is {VERSION}")
            require("content" in container.description, "it has no content")
            content = container.description["content"]
            require(isinstance(content, dict), "its content is not an object")
            tensors = container.read_all()
            state = {name: unpack(value, tensors) for name, value in content.items()}
            for name in _ENTRIES:
                require(isinstance(state.get(name), dict), f"it has no {name}")
            return state
    except (ArtifactError, RecursionError) as error:
        reason = error.reason if isinstance(error, ArtifactError) else None
        raise CheckpointError(f"{path} is no checkpoint: {reason or error}") from error


def pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """The value as JSON holds it; its tensors are added to `tensors`, under names that begin with a number.

    >>> tensors = {}
    >>> packed = pack({"w": torch.ones(2), "step": (3, [None, 0.5])}, tensors, "state")
    >>> packed
    {'dict': {'w': {'tensor': '0/state/w'}, 'step': {'tuple': [3, [None, 0.5]]}}}
    >>> unpack(packed, tensors)
    {'w': tensor([1., 1.]), 'step': (3, [None, 0.5])}
    """
    if isinstance(value, Tensor):
        return _pack_tensor(value, tensors, where)
    if isinstance(value, Mapping):
        packed = {key: pack(entry, tensors, f"{where}/{key}") for key, entry in value.items()}
        if all(type(key) is str for key in packed):
            return {"dict": packed}
        if all(type(key) in (str, int) for key in packed):
            return {"items": [[key, entry] for key, entry in packed.items()]}
    if isinstance(value, list | tuple):
        entries = [pack(entry, tensors, f"{where}/{i}") for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else {"tuple": entries}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    raise InvalidArgumentError(
        f"checkpoint: {where} is a {type(value).__name__}, or has such keys; allowed: tensors, numbers, text, None, "
        "and lists, tuples and dicts of these"
    )


def _pack_tensor(tensor: Tensor, tensors: dict[str, Tensor], where: str) -> dict[str, str]:
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    if plain.layout is not torch.strided or plain.is_quantized or plain.dtype not in DTYPES.values():
        raise InvalidArgumentError(f"checkpoint: {where} is {tensor.dtype}, {tensor.layout}; allowed: plain tensors")
    name = f"{len(tensors)}/{where}"
    tensors[name] = plain
    return {"complex" if tensor.is_complex() else "tensor": name}


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value again; raises `Damaged` for what `pack` does not write."""
    if packed is None or isinstance(packed, bool | int | float | str):
        return packed
    if isinstance(packed, list):
        return [unpack(entry, tensors) for entry in packed]
    require(isinstance(packed, dict) and len(packed) == 1, "a value in it is of no kind")
    match packed:
        case {"dict": dict(entries)}:
            return {key: unpack(entry, tensors) for key, entry in entries.items()}
        case {"items": list(entries)}:
            are_pairs = all(isinstance(e, list) and len(e) == 2 and type(e[0]) in (str, int) for e in entries)
            require(are_pairs and len({key for key, _ in entries}) == len(entries), "a dict in it is none")
            return {key: unpack(entry, tensors) for key, entry in entries}
        case {"tuple": list(entries)}:
            return tuple(unpack(entry, tensors) for entry in entries)
        case {"float": str(text)}:
            require(text in ("nan", "inf", "-inf"), f"a number in it is {text!r:.40}")
            return float(text)
        case {"tensor": str(name)} | {"complex": str(name)}:
            require(name in tensors, f"tensor {name!r:.80} is missing")
            return tensors[name] if "tensor" in packed else _complex(name, tensors[name])
    raise Damaged(f"a value in it is a {next(iter(packed))!r:.40}")


def _complex(name: str, parts: Tensor) -> Tensor:
    is_pair = parts.dtype in (torch.float32, torch.float64) and parts.dim() > 0 and parts.shape[-1] == 2
    require(is_pair, f"tensor {name!r:.80} is not of complex numbers")
    return torch.view_as_complex(parts.contiguous())


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
    kind, keys, place, *rest = state["numpy"]
    is_keys = isinstance(keys, Tensor) and keys.shape == (624,) and keys.dtype == torch.int64
    if kind != "MT19937" or not is_keys or type(place) is not int or not 0 <= place <= 624:
        raise ValueError("the state of numpy's generator is not one")  # it takes any place, and then reads there
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state((kind, keys.numpy().astype(np.uint32), place, *rest))  # noqa: NPY002


def seed_everything(seed: int) -> None:
    """Start all of them from one seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
