"""The outer shape of the files: safetensors, with a description in JSON and checksums.

The metadata have one entry, "decomposable", a JSON object that begins with "sha256" and "format". That checksum is the
SHA-256 of the header, with its own 64 digits read as zeros. The header holds those of the tensors, one for each block
of rows, that is of indices along the first axis. So a change of any bit that is read is found, and some rows of a
tensor can be had without the others. Axes lie in order; the strides that a tensor had otherwise are in the description.

What a tensor becomes in memory, one of torch or an array of numpy, is what `Memory` says. Nothing in a file is trusted:
it is not executed, and no memory is taken for what it merely claims to hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from decomposable_edge.errors import ArtifactError, InvalidArgumentError
from decomposable_edge.fields import MOST_VALUES, Corrupt, Damaged, are_counts, parse_json, require, values_in
from decomposable_edge.file.header import CODES, MOST_BYTES, Entry, expect, itemsize, parse_header, read_at, read_header
from decomposable_edge.files import replacing
from decomposable_edge.text import one_line

FORMAT = 3
"""The version of the format that is written and read. (Those before were never released.)"""

FilePath = str | os.PathLike[str]
Array = NDArray[Any]
A = TypeVar("A")

_ENTRY = "decomposable"
_OWN_FIELDS = ("sha256", "format", "strides", "blocks")
_DIGITS = 64  # of one SHA-256
_NO_DIGEST = "0" * _DIGITS
_MOST_BLOCKS = 64  # of a tensor: the rest of a block is less than 2% of it
_LEAST_BYTES = 4096  # of a block: a page is what a disk reads, and the checksums stay small beside the tensors


class Memory(Protocol[A]):
    """What tensors are in memory."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> A:
        """Return one without content; flags are bytes here."""

    def bytes_of(self, array: A, /) -> memoryview:
        """Return its bytes, not copied."""

    def filled(self, array: A, dtype: str, strides: Sequence[int] | None) -> A:
        """Return what it is once its bytes are there: flags again, and laid out by these strides if there are any."""


class InNumpy:
    """Arrays of numpy, axes in order, which cannot be written to."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return one without content; flags are bytes here."""
        require(hasattr(np, dtype) or dtype == "bool", f"it has numbers of the type {dtype}, which a device has not")
        return np.empty(shape, np.uint8 if dtype == "bool" else np.dtype(dtype).newbyteorder("<"))

    def bytes_of(self, array: Array) -> memoryview:
        """Return its bytes, not copied."""
        return np.atleast_1d(array).reshape(-1).view(np.uint8).data if array.size else memoryview(b"")

    def filled(self, array: Array, dtype: str, strides: Sequence[int] | None) -> Array:
        """Return what it is once its bytes are there."""
        array = array != 0 if dtype == "bool" else array
        array.flags.writeable = False
        return array


@dataclass(frozen=True)
class Blocks:
    """The checksums of one tensor's blocks of `rows` rows, one after the other. The last block may be shorter."""

    rows: int
    sha256: str

    @classmethod
    def of(cls, shape: Sequence[int], content: memoryview) -> Blocks:
        """Return the blocks of a tensor of this shape with these bytes.

        >>> blocks = Blocks.of((100, 1024), memoryview(bytes(100 * 4096)))
        >>> blocks.rows, len(blocks.sha256) // 64
        (2, 50)
        """
        count = _row_count(shape)
        row_bytes = content.nbytes // max(1, count)
        rows = max(1, -(-count // _MOST_BLOCKS), -(-_LEAST_BYTES // max(1, row_bytes)))
        rows = min(rows, max(1, count))
        starts = range(0, content.nbytes, max(1, rows * row_bytes))
        return cls(rows, "".join(hashlib.sha256(content[i : i + rows * row_bytes]).hexdigest() for i in starts))

    @classmethod
    def from_json(cls, name: str, value: Any, shape: Sequence[int]) -> Blocks:
        """Return the blocks that a file claims for a tensor of this shape."""
        is_pair = isinstance(value, list) and len(value) == 2 and type(value[0]) is int and isinstance(value[1], str)
        require(is_pair, f"tensor '{name}' has no checksums")
        rows, sha256 = value
        is_right = 1 <= rows <= max(1, _row_count(shape))
        is_right = is_right and len(sha256) == _DIGITS * (-(-_row_count(shape) // rows) if 0 not in shape else 0)
        require(is_right, f"tensor '{name}' has not a checksum for each of its blocks")
        return cls(rows, sha256)

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """Return which rows have to be read to verify these; the end may lie behind the last row."""
        return start // self.rows * self.rows, -(-stop // self.rows) * self.rows

    def verify(self, name: str, start: int, row_bytes: int, parts: Sequence[memoryview]) -> None:
        """Raise unless these bytes, which lie one behind the other from the row `start` on, are what was written.

        They begin where a block begins, and end where one ends.
        """
        block = self.rows * row_bytes
        for i in range(-(-sum(part.nbytes for part in parts) // block)):
            hasher, begin = hashlib.sha256(), i * block  # where the block begins in the part
            for part in parts:
                hasher.update(part[max(0, begin) : max(0, begin + block)])
                begin -= part.nbytes
            at = _DIGITS * (start // self.rows + i)
            if hasher.hexdigest() != self.sha256[at : at + _DIGITS]:
                raise Corrupt(f"the checksum of tensor '{name}' is wrong: it was damaged or changed")


def _row_count(shape: Sequence[int]) -> int:
    """Return the length of the first axis; a single number is one row."""
    return shape[0] if len(shape) else 1


class Stored(Generic[A]):
    """A tensor that lies in an open file: ``[i]``, ``[:n]``, ``[i:n]`` and ``[[i, j]]`` along its first axis are read,
    and verified, when they are taken. `strides` are those that it had where they are not the usual ones.
    """

    def __init__(
        self, file: FileIO, name: str, entry: Entry, blocks: Blocks, strides: Any, path: Path, memory: Memory[A]
    ) -> None:
        self._file, self._entry, self._blocks, self._memory, self._path = file, entry, blocks, memory, path
        self.name, self.shape, self.dtype = name, entry.shape, entry.dtype
        is_right = strides is None or (
            are_counts(strides) and len(strides) == len(self.shape) and is_dense(self.shape, strides)
        )
        require(is_right, f"tensor '{name}' of shape {self.shape} cannot have the strides {strides!r:.80}")
        self.strides: tuple[int, ...] | None = None if strides is None else tuple(strides)

    def __len__(self) -> int:
        return _row_count(self.shape)

    @property
    def nbytes(self) -> int:
        """Return how many bytes it takes in the file."""
        return self._entry.end - self._entry.start

    def __getitem__(self, key: Any) -> A:
        match key:
            case int():
                row = range(len(self))[key]
                return self._rows(row, row + 1)[0]  # type: ignore[index]
            case slice(step=None):
                found = range(len(self))[key]
                return self._rows(found.start, max(found.start, found.stop))
            case list():
                return self[: max(key) + 1][key]  # type: ignore[index]
        raise TypeError(f"[{key}]: only [i], [i:n] and [[i, j]] are read from a file")

    def all(self) -> A:
        """Return the whole tensor, laid out as it was."""
        return self._read(0, len(self), self.shape, self.strides)

    def _rows(self, start: int, stop: int) -> A:
        return self._read(start, stop, (stop - start, *self.shape[1:]), None)

    def _read(self, start: int, stop: int, shape: tuple[int, ...], strides: Sequence[int] | None) -> A:
        with naming(self._path):
            made = self._memory.empty(shape, self.dtype)
            if stop > start and self.nbytes:
                self._fill(start, stop, self._memory.bytes_of(made))
        return self._memory.filled(made, self.dtype, strides)

    def _fill(self, start: int, stop: int, content: memoryview) -> None:
        """Read these rows, and what is needed besides to verify them."""
        row_bytes = self.nbytes // len(self)
        first, last = self._blocks.around(start, stop)
        rest = [bytearray((start - first) * row_bytes), bytearray((min(last, len(self)) - stop) * row_bytes)]
        parts = [memoryview(rest[0]), content, memoryview(rest[1])]
        place = self._entry.start + first * row_bytes
        for part in parts:
            read_at(self._file, place, part)
            place += part.nbytes
        self._blocks.verify(self.name, first, row_bytes, parts)


class _OpenFile(FileIO):
    """A file that is closed, without a word, when nothing refers to it any more."""

    def __del__(self) -> None:
        self.close()


class Container(Generic[A]):
    """An open file whose header is right: its description, and its tensors, which are read when they are asked for.

    The file is closed by `close`, or when nothing refers to it or to a tensor of it any more.
    """

    def __init__(self, path: FilePath, memory: Memory[A]) -> None:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for, a device read without end
            raise ArtifactError.of(path, "not an ordinary file")
        self.path, self._file = Path(path), _OpenFile(path, "rb")
        try:
            with naming(self.path):
                self._parse(memory)
        except BaseException:
            self._file.close()
            raise

    def _parse(self, memory: Memory[A]) -> None:
        expect(self._file, "RANDOM")
        header = read_header(self._file)
        entries, metadata = parse_header(header, os.fstat(self._file.fileno()).st_size)
        self.description = _checked_description(metadata)
        stated = self.description["sha256"]
        require(_digest_of(header, stated)[0] == stated, "its checksum is wrong: it was damaged or changed")
        strides, blocks = self.description.get("strides"), self.description.get("blocks")
        if not isinstance(strides, dict) or not isinstance(blocks, dict):
            raise Damaged("its strides or checksums are not an object")
        self.tensors: dict[str, Stored[A]] = {}
        for name, entry in entries.items():
            own = Blocks.from_json(name, blocks.get(name), entry.shape)
            self.tensors[name] = Stored(self._file, name, entry, own, strides.get(name), self.path, memory)
        require(len(blocks) <= len(entries), "it has checksums of tensors that are not there")

    def close(self) -> None:
        """Let go of the file: no tensor of it can be read any more."""
        self._file.close()

    def read_all(self) -> dict[str, A]:
        """Return every tensor."""
        self.expect_all()
        return {name: stored.all() for name, stored in self.tensors.items()}

    def expect_all(self) -> None:
        """Say that all of it is going to be read, so that the system may read ahead; at first it is told not to."""
        expect(self._file, "NORMAL")


@contextmanager
def naming(path: FilePath) -> Iterator[None]:
    """Turn what is found to be damaged into an `ArtifactError` with the name of the file."""
    try:
        yield
    except (Damaged, RecursionError) as error:
        raise ArtifactError.of(path, one_line(error)) from error


@contextmanager
def opened(path: FilePath, memory: Memory[A]) -> Iterator[Container[A]]:
    """Give the file, to be read from; whatever is found to be damaged meanwhile is an `ArtifactError` with its name."""
    container = Container(path, memory)
    try:
        with naming(path):
            yield container
    finally:
        container.close()


def write(
    path: FilePath,
    description: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, Sequence[int], memoryview]],
    strides: Mapping[str, Sequence[int]] | None = None,
) -> int:
    """Write the file at once or not at all, and return its size; `description` is JSON-able.

    Of every tensor its type, its shape and its bytes are given, axes in order.
    """
    content = {
        "sha256": _NO_DIGEST,
        "format": FORMAT,
        **{key: value for key, value in description.items() if key not in _OWN_FIELDS},
        "strides": strides or {},
        "blocks": {name: [(b := Blocks.of(shape, data)).rows, b.sha256] for name, (_, shape, data) in tensors.items()},
    }
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    if len(text) > MOST_BYTES // 2 or values_in(text) > MOST_VALUES // 2:  # the rest is for the tensors' own entries
        why = f"the description takes {len(text):,} bytes for {values_in(text):,} values"
        allowed = f"{MOST_BYTES // 2:,} bytes, {MOST_VALUES // 2:,} values"
        raise InvalidArgumentError.about("info", len(text), allowed, why=why)
    names = sorted(tensors, key=lambda name: (-itemsize(tensors[name][0]), name))  # so that numbers lie at their places
    entries: dict[str, Any] = {"__metadata__": {_ENTRY: text}}
    end = 0
    for name in names:
        dtype, shape, data = tensors[name]
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [end, end + data.nbytes]}
        end += data.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    header = len(header).to_bytes(8, "little") + header
    digest, place = _digest_of(header, _NO_DIGEST)
    with replacing(Path(path)) as unfinished, FileIO(unfinished, "wb") as file:
        first = memoryview(header[:place] + digest.encode() + header[place + _DIGITS :])
        for rest in (first, *(tensors[name][2] for name in names)):
            while rest.nbytes:
                rest = rest[file.write(rest) :]
    return len(header) + end


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
    is_digest = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None
    require(is_digest, "its description has no checksum")
    return description


def _digest_of(header: bytes, stated: str) -> tuple[str, int]:
    """Return the SHA-256 of the header with the first place that holds the `stated` digits read as zeros; and where."""
    place = header.find(stated.encode())
    require(place >= 0, "its description has no checksum")
    zeros = _NO_DIGEST.encode()
    return hashlib.sha256(header[:place] + zeros + header[place + _DIGITS :]).hexdigest(), place


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the entries lie side by side with no gap, in whatever order of the axes."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected or size == 0:
            return False
        expected *= size
    return True
