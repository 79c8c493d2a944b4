"""The outer shape of the files: safetensors, with a description in JSON and checksums.

The metadata have one entry, "decomposable", a JSON object that begins with "sha256" and "format". That checksum is the
SHA-256 of the header, with its own 64 digits read as zeros; the header holds those of the tensors, in blocks of rows
(`digests.py`). So a change of any bit that is read is found, be it in a tensor, a shape or the description, and the
first rows of a tensor can be had without reading the others, by plain reads (`header.py`). Tensors are stored with
their axes in order; the strides of those that lie otherwise in memory, such as channels-last weights, are in the
description, and what is read has them again.

Nothing in a file is trusted: it is not executed, and no memory is taken for what it merely claims to hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from decomposable.network.file.digests import Blocks, as_bytes, row_count
from decomposable.network.file.header import MOST_BYTES, Entry, expect, parse_header, read_at, read_header
from decomposable_edge.errors import ArtifactError, InvalidArgumentError
from decomposable_edge.fields import MOST_VALUES, Damaged, parse_json, values_in
from decomposable_edge.files import replacing
from decomposable_edge.text import first_line, one_line

FORMAT = 2
"""The version of the format that is written and read. (Version 1, with one checksum over the whole file, was never
released.)"""

FilePath = str | os.PathLike[str]

_ENTRY = "decomposable"
_OWN_FIELDS = ("sha256", "format", "strides", "blocks")
_NO_DIGEST = "0" * 64


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


def write_container(path: FilePath, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write the file at once or not at all; `description` is JSON-able."""
    strides = {name: list(tensor.stride()) for name, tensor in tensors.items() if _lies_otherwise(tensor)}
    stored = _each_in_memory_of_its_own(tensors)
    blocks = {name: Blocks.of(tensor) for name, tensor in stored.items()}
    content = {
        "sha256": _NO_DIGEST,
        "format": FORMAT,
        **{key: value for key, value in description.items() if key not in _OWN_FIELDS},
        "strides": strides,
        "blocks": {name: [each.rows, each.sha256] for name, each in blocks.items()},
    }
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    if len(text) > MOST_BYTES // 2 or values_in(text) > MOST_VALUES // 2:  # the rest is for the tensors' own entries
        raise InvalidArgumentError(
            f"info: the description takes {len(text):,} bytes for {values_in(text):,} values; allowed: "
            f"{MOST_BYTES // 2:,} bytes, {MOST_VALUES // 2:,} values"
        )
    with replacing(Path(path)) as unfinished:
        unfinished.touch()
        usual_mode = stat.S_IMODE(unfinished.stat().st_mode)
        try:
            save_file(stored, unfinished, metadata={_ENTRY: text})
        except SafetensorError as error:
            raise OSError(f"{path}: it could not be written: {first_line(error)}") from error
        unfinished.chmod(usual_mode)  # safetensors makes files that nobody else can read
        with FileIO(unfinished, "r+b") as file:
            digest, position = _digest_of(read_header(file), _NO_DIGEST)
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


class Container:
    """An open file whose header is right: its description, and its tensors, which are read when they are asked for.

    `outlines` are the tensors without their content, on the meta device: shape, type, and strides as they had them.
    """

    def __init__(self, path: Path, file: FileIO, entries: Mapping[str, Entry], description: dict[str, Any]) -> None:
        self.path, self._file, self._entries, self.description = path, file, entries, description
        self.outlines: dict[str, Tensor] = {}
        self._blocks: dict[str, Blocks] = {}
        strides, blocks = description.get("strides"), description.get("blocks")
        if not isinstance(strides, dict) or not isinstance(blocks, dict):
            raise Damaged("its strides or checksums are not an object")
        for name, entry in entries.items():
            self.outlines[name] = _outline(name, entry, strides.get(name))
            self._blocks[name] = Blocks.from_json(name, blocks.get(name), entry.shape)
        if len(blocks) > len(self.outlines):
            raise Damaged("it has checksums of tensors that are not there")

    def read(self, name: str, rows: int | None = None) -> Tensor:
        """The tensor in memory of its own, verified and laid out as it was; of its first rows alone, axes in order."""
        outline, blocks = self.outlines[name], self._blocks[name]
        count = row_count(outline.shape)
        if outline.numel() == 0:
            return torch.empty_like(outline[:rows] if outline.dim() else outline, device="cpu")
        kept = count if rows is None else min(rows, count)
        plain, end = self._rows(name, 0, kept), min(blocks.end(kept), count)
        blocks.verify(name, plain, self._rows(name, kept, end) if end > kept else None)
        if outline.dtype == torch.bool:
            plain = plain.ne(0)
        return plain if rows is not None else like(outline, plain)

    def _rows(self, name: str, start: int, end: int) -> Tensor:
        """Rows of the file. A flag is still the byte that is stored."""
        entry = self._entries[name]
        dtype = torch.uint8 if entry.dtype == torch.bool else entry.dtype
        shape = (end - start, *entry.shape[1:]) if entry.shape else ()
        rows = torch.empty(shape, dtype=dtype, device="cpu")
        read_at(self._file, entry.start + start * (rows.nbytes // max(1, end - start)), as_bytes(rows))
        return rows

    def expect_all(self) -> None:
        """Say that all of it is going to be read, so that the system may read ahead; at first it is told not to."""
        expect(self._file, "NORMAL")

    def read_all(self) -> dict[str, Tensor]:
        """Every tensor."""
        self.expect_all()
        return {name: self.read(name) for name in self.outlines}


@contextmanager
def open_container(path: FilePath) -> Iterator[Container]:
    """The file, to be read from; whatever is found to be damaged meanwhile is an `ArtifactError` with its name."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for, a device read without end
        raise ArtifactError.of(path, "not an ordinary file")
    try:
        with FileIO(path, "rb") as file:
            expect(file, "RANDOM")
            header = read_header(file)
            entries, metadata = parse_header(header, os.fstat(file.fileno()).st_size)
            description = _checked_description(metadata)
            if _digest_of(header, description["sha256"])[0] != description["sha256"]:
                raise Damaged("its checksum is wrong: it was damaged or changed")
            yield Container(Path(path), file, entries, description)
    except Damaged as error:
        raise ArtifactError.of(path, one_line(error)) from error


def read_container(path: FilePath) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and all the tensors of a file whose checksums are right; raise `ArtifactError` otherwise."""
    with open_container(path) as container:
        return container.description, container.read_all()


def like(outline: Tensor, plain: Tensor) -> Tensor:
    """The tensor laid out in memory as the outline is; itself where it is so already."""
    if plain.stride() == outline.stride():
        return plain
    return torch.empty_strided(outline.shape, outline.stride(), dtype=plain.dtype).copy_(plain)


def _checked_description(metadata: Mapping[str, str]) -> dict[str, Any]:
    text = metadata.get(_ENTRY)
    if text is None:
        raise Damaged("a safetensors file, but not one of this package: its metadata have no 'decomposable'")
    description = parse_json(text)
    version = description.get("format") if isinstance(description, dict) else None
    if type(version) is not int or version < 1:
        raise Damaged("its description has no format version")
    if version != FORMAT:
        advice = "install a newer one" if version > FORMAT else "save the network again"
        raise Damaged(f"its format is version {version}, this package reads version {FORMAT}; {advice}")
    digest = description.get("sha256")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise Damaged("its description has no checksum")
    return description


def _digest_of(header: bytes, stated: str) -> tuple[str, int]:
    """SHA-256 of the header with the first place that holds the `stated` digits read as zeros, and that place."""
    place = header.find(stated.encode())
    if place < 0:
        raise Damaged("its description has no checksum")
    zeros = _NO_DIGEST.encode()
    return hashlib.sha256(header[:place] + zeros + header[place + len(stated) :]).hexdigest(), place


def _outline(name: str, entry: Entry, strides: object) -> Tensor:
    """A tensor without its content, laid out as it was when it was written."""
    shape, dtype = entry.shape, entry.dtype
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    is_list = isinstance(strides, list) and len(strides) == len(shape)
    if not is_list or not all(type(s) is int and 0 <= s < 1 << 48 for s in strides):  # type: ignore[attr-defined]
        raise Damaged(f"tensor '{name}' has the strides {strides!r:.80}")
    if not _is_dense(shape, strides):  # type: ignore[arg-type]
        raise Damaged(f"tensor '{name}' of shape {shape} cannot have the strides {strides!r:.80}")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")  # type: ignore[arg-type]


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
