"""The outer shape of the files: safetensors, with a description in JSON and a checksum over every byte.

The metadata have one entry, "decomposable", a JSON object that begins with "sha256" and "format". The checksum is the
SHA-256 of the whole file with its own 64 digits read as zeros, so that a change of any bit is found, be it in a
tensor, a shape or the description. Tensors are stored with their axes in order; the strides of those that lie otherwise
in memory, such as channels-last weights, are in the description, and what is read has them again.

Nothing in a file is trusted: it is not executed, and no memory is taken for what it merely claims to hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decomposable.errors import ArtifactError, InvalidArgumentError
from decomposable.files import replacing
from decomposable.storage.fields import Damaged

FORMAT = 1
"""The version of the format that is written; a file of a larger one is refused."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What can be stored, by its name in the file."""

_ENTRY = "decomposable"
_NO_DIGEST = "0" * 64
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors itself


def as_json(option: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A dict as JSON gives it back: tuples are lists, keys are text; refuse what JSON cannot hold."""
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f"{option}={value!r:.80}; allowed: a dict")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
        return plain
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{option}: it cannot be written as JSON ({error}); allowed: dicts with text as keys, lists, text, "
            "finite numbers, true, false and None"
        ) from error


def write_container(
    path: str | os.PathLike[str], description: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write the file at once or not at all; `description` is JSON-able."""
    strides = {name: list(tensor.stride()) for name, tensor in tensors.items() if _lies_otherwise(tensor)}
    content = {"sha256": _NO_DIGEST, "format": FORMAT, **description, "strides": strides}
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    if len(text) > _MOST_HEADER_BYTES // 2:
        raise InvalidArgumentError(f"info: the description takes {len(text):,} bytes; allowed: 50 million")
    with replacing(Path(path)) as unfinished:
        unfinished.touch()
        usual_mode = stat.S_IMODE(unfinished.stat().st_mode)
        try:
            save_file(_each_in_memory_of_its_own(tensors), unfinished, metadata={_ENTRY: text})
        except SafetensorError as error:
            raise OSError(f"{path}: it could not be written: {_first_line(error)}") from error
        unfinished.chmod(usual_mode)  # safetensors makes files that nobody else can read
        with unfinished.open("r+b") as file:
            digest, position = _digest_of(file, _NO_DIGEST)
            file.seek(position)
            file.write(digest.encode())


def _each_in_memory_of_its_own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies where the tensors are not so already; safetensors refuses those that share memory."""
    seen: set[int] = set()
    stored = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        address = plain.untyped_storage().data_ptr()
        stored[name] = plain.clone(memory_format=torch.contiguous_format) if address in seen else plain
        seen.add(address)
    return stored


def read_container(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a file whose checksum is right; raise `ArtifactError` otherwise."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for, a device read without end
        raise ArtifactError(f"{path}: not an ordinary file")
    try:
        with safe_open(os.fspath(path), framework="pt") as opened:
            description = _checked_description(opened.metadata())
            with Path(path).open("rb") as file:
                digest, _ = _digest_of(file, description["sha256"])
            if digest != description["sha256"]:
                raise Damaged("its checksum is wrong: it was damaged or changed")
            strides = description.get("strides")
            if not isinstance(strides, dict):
                raise Damaged("its strides are not an object")
            return description, {name: _tensor(opened, name, strides.get(name)) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ArtifactError(f"{path}: not a whole safetensors file ({_first_line(error)})") from error
    except (Damaged, RecursionError) as error:
        raise ArtifactError(f"{path}: {error}") from error


def _checked_description(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    text = (metadata or {}).get(_ENTRY)
    if text is None:
        raise Damaged("a safetensors file, but not one of this package: its metadata have no 'decomposable'")
    try:
        description = json.loads(text)
    except ValueError as error:
        raise Damaged(f"its description is not JSON ({_first_line(error)})") from error
    version = description.get("format") if isinstance(description, dict) else None
    if type(version) is not int or version < 1:
        raise Damaged("its description has no format version")
    if version > FORMAT:
        raise Damaged(f"its format is version {version}, this package reads up to {FORMAT}; install a newer one")
    digest = description.get("sha256")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise Damaged("its description has no checksum")
    return description


def _digest_of(file: BinaryIO, stated: str) -> tuple[str, int]:
    """SHA-256 of the file with the first place that holds the `stated` digits read as zeros, and that place."""
    length = int.from_bytes(file.read(8), "little")
    header = file.read(min(length, _MOST_HEADER_BYTES))
    place = header.find(stated.encode())
    if place < 0:
        raise Damaged("its description has no checksum")
    hasher = hashlib.sha256(length.to_bytes(8, "little"))
    hasher.update(header[:place] + _NO_DIGEST.encode() + header[place + len(stated) :])
    while block := file.read(1 << 20):
        hasher.update(block)
    return hasher.hexdigest(), 8 + place


def _tensor(opened: Any, name: str, strides: object) -> Tensor:
    """A tensor in memory of its own, laid out as it was when it was written."""
    part = opened.get_slice(name)
    if part.get_dtype() not in DTYPES:
        raise Damaged(f"tensor '{name}' has type {part.get_dtype()}")
    stored: Tensor = opened.get_tensor(name)
    if strides is None:
        return stored.clone()
    is_list = isinstance(strides, list) and len(strides) == stored.dim()
    if not is_list or not all(type(s) is int and 0 <= s < 1 << 48 for s in strides):  # type: ignore[attr-defined]
        raise Damaged(f"tensor '{name}' has the strides {strides!r:.80}")
    if not _is_dense(stored.shape, strides):  # type: ignore[arg-type]
        raise Damaged(f"tensor '{name}' of shape {tuple(stored.shape)} cannot have the strides {strides!r:.80}")
    return torch.empty_strided(stored.shape, strides, dtype=stored.dtype).copy_(stored)  # type: ignore[arg-type]


def _lies_otherwise(tensor: Tensor) -> bool:
    usual = torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride() != usual and _is_dense(tensor.shape, tensor.stride())


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the entries lie side by side with no gap, in whatever order of the axes."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected or size == 0:
            return False
        expected *= size
    return True


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
