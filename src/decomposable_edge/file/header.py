"""The header of a safetensors file: where each tensor lies, and what it is.

The file is read plainly, and not mapped into memory: a page of a mapping brings megabytes around it from the disk, and
one that is cut short meanwhile ends the process. What safetensors itself refuses is refused here, too.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from typing import Any, Literal

from decomposable_edge.fields import MOST, Corrupt, Damaged, are_counts, parse_json, require
from decomposable_edge.locks import ForkLock

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""What can be stored: the name of a type in a file, and what torch (and numpy, where it has it) calls it."""

CODES = {dtype: code for code, dtype in DTYPES.items()}
"""The other way round."""

MOST_BYTES = 32_000_000
"""Of a header; safetensors itself reads up to 100 million. (A ResNet-50 has 0.7 million.)"""

_LENGTH_BYTES = 8  # at the very beginning: how long the header is
_MOST_AXES = 64


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its type, its shape, and where its bytes begin and end."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def itemsize(dtype: str) -> int:
    """Return how many bytes a number of this type takes.

    >>> itemsize("float32"), itemsize("float8_e5m2"), itemsize("bool")
    (4, 1, 1)
    """
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


def read_header(file: FileIO) -> bytes:
    """Return the header with its 8 bytes of length, as it stands there."""
    size = os.fstat(file.fileno()).st_size
    require(size >= _LENGTH_BYTES, _not_whole("it is too short for a header"))
    length = int.from_bytes(read_at(file, 0, bytearray(_LENGTH_BYTES)), "little")
    require(length <= size - _LENGTH_BYTES, _not_whole(f"its header claims {length:,} bytes"))
    require(length <= MOST_BYTES, f"its header has {length:,} bytes; allowed: at most {MOST_BYTES:,}")
    return bytes(read_at(file, 0, bytearray(_LENGTH_BYTES + length)))


def read_at(file: FileIO, place: int, content: bytearray | memoryview) -> bytearray | memoryview:
    """Fill the content with the bytes from there on. Any number of threads may do so."""
    rest = memoryview(content)
    while rest.nbytes:
        count = _read_some(file, place, rest)  # a system reads so much at a time and no more
        if not count:
            raise Corrupt(_not_whole("it was cut short while it was read"))
        rest, place = rest[count:], place + count
    return content


_turns = ForkLock()  # only where the system cannot read at a place


def _read_some(file: FileIO, place: int, content: memoryview) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [content], place)
    with _turns:
        file.seek(place)
        return file.readinto(content)


def parse_header(header: bytes, file_size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors by name, in order, and the metadata; raise `Damaged` where any of it is wrong."""
    try:
        text = header[_LENGTH_BYTES:].decode()
    except UnicodeDecodeError as error:
        raise Damaged(_not_whole("its header is not text")) from error
    require(text.startswith("{"), _not_whole("its header is not JSON"))
    values = parse_json(text, "its header")
    metadata = values.pop("__metadata__", {})
    is_text = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    require(is_text, _not_whole("its metadata are not text"))
    entries = {name: _entry(name, values[name], len(header)) for name in sorted(values)}
    end = len(header)
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        require(entry.start == end, _not_whole(f"tensor '{name:.80}' does not begin where the one before ends"))
        end = entry.end
    require(end == file_size, _not_whole(f"its tensors end at byte {end:,} of {file_size:,}"))
    return entries, metadata


def _entry(name: str, value: Any, data: int) -> Entry:
    """Return a tensor; `data` is where the bytes of the first one begin."""
    is_entry = isinstance(value, dict) and value.keys() == {"dtype", "shape", "data_offsets"}
    require(is_entry, _not_whole(f"tensor '{name:.80}' is not described"))
    shape, offsets, dtype = value["shape"], value["data_offsets"], value["dtype"]
    require(isinstance(dtype, str) and dtype in DTYPES, f"tensor '{name:.80}' has type {dtype!r:.40}")
    require(are_counts(shape) and len(shape) <= _MOST_AXES, f"tensor '{name:.80}' has the shape {shape!r:.80}")
    claimed = 1
    for size in shape:
        claimed *= max(1, size)  # one that is empty may claim any other extent
        require(claimed < MOST, f"tensor '{name:.80}' has the shape {shape!r:.80}")
    nbytes = 0 if 0 in shape else claimed * itemsize(DTYPES[dtype])
    is_right = are_counts(offsets) and len(offsets) == 2 and offsets[1] - offsets[0] == nbytes
    require(is_right, _not_whole(f"tensor '{name:.80}' of shape {shape!r:.80} has the bytes {offsets!r:.80}"))
    return Entry(DTYPES[dtype], tuple(shape), data + offsets[0], data + offsets[1])


def _not_whole(reason: str) -> str:
    return f"not a whole safetensors file ({reason})"


def expect(file: FileIO, advice: Literal["RANDOM", "NORMAL"]) -> None:
    """Tell the system what will be read, where it can be told: for parts, at random, it need not read ahead."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # it is advice
            os.posix_fadvise(file.fileno(), 0, 0, getattr(os, f"POSIX_FADV_{advice}"))
