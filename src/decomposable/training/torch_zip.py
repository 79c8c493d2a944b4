"""The directory of a zip archive of `torch.save`, checked before anything is read by it.

Such an archive stores its entries as they are, one behind the other, each once. Whatever is otherwise is refused: what
is compressed may grow a thousandfold, and entries that lie in one another are read several times.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from decomposable.data.pickling import Refused

MOST_DIRECTORY = 8_000_000
"""Bytes of the directory: some 100,000 entries, which take 1 kB of memory each."""

_END, _END_64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_LOCAL = struct.Struct("<4s5H3L2H")


@dataclass(frozen=True)
class Entry:
    """Bytes of the archive: where they begin, how many they are, and their checksum."""

    start: int
    size: int
    crc: int


def entries_of(stream: BinaryIO) -> dict[str, Entry]:
    """The entries by name."""
    size = os.fstat(stream.fileno()).st_size
    directory = _directory_size(stream, size)
    if directory > min(size, MOST_DIRECTORY):
        raise Refused(f"a directory of {directory:,} bytes (at most {MOST_DIRECTORY:,} are read)")
    with zipfile.ZipFile(stream) as archive:
        found, end = archive.infolist(), archive.start_dir
    entries: dict[str, Entry] = {}
    before = 0
    for info in sorted(found, key=lambda info: info.header_offset):
        name = info.filename
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise Refused(f"{name[:60]!r}, which is compressed or encrypted")
        if name in entries or info.header_offset < before:
            raise Refused(f"{name[:60]!r} twice, or inside of another entry")
        start = _start_of(stream, info.header_offset)
        before = start + info.file_size
        if before > end:
            raise ValueError("an entry reaches into the directory")
        entries[name] = Entry(start, info.file_size, info.CRC)
    return entries


def read_entry(stream: BinaryIO, entry: Entry) -> Tensor:
    """The bytes of an entry, whose checksum has to be right."""
    content = torch.empty(entry.size, dtype=torch.uint8)
    stream.seek(entry.start)
    count = stream.readinto(content.numpy())  # type: ignore[attr-defined]
    if count != entry.size or zlib.crc32(content.numpy().data) != entry.crc:
        raise ValueError("a checksum in it is wrong")
    return content


def _directory_size(stream: BinaryIO, size: int) -> int:
    """As the end of the archive says it; torch writes no comment behind it."""
    end = _read_at(stream, size - _END.size, _END)
    if end[0] != b"PK\x05\x06":
        raise ValueError("the end of the archive is not there")
    if size >= _END.size + _LOCATOR.size:
        locator = _read_at(stream, size - _END.size - _LOCATOR.size, _LOCATOR)
        if locator[0] == b"PK\x06\x07":
            large = _read_at(stream, size - _END.size - _LOCATOR.size - _END_64.size, _END_64)
            if large[0] != b"PK\x06\x06":
                raise ValueError("the end of the archive is not there")
            return max(int(large[8]), 0 if end[5] == 0xFFFFFFFF else int(end[5]))
    return int(end[5])


def _start_of(stream: BinaryIO, offset: int) -> int:
    """Where the bytes of an entry begin, behind its own header."""
    header = _read_at(stream, offset, _LOCAL)
    if header[0] != b"PK\x03\x04":
        raise ValueError("an entry is not where the directory says")
    return offset + _LOCAL.size + int(header[9]) + int(header[10])


def _read_at(stream: BinaryIO, place: int, layout: struct.Struct) -> tuple[Any, ...]:
    stream.seek(max(0, place))
    return layout.unpack(stream.read(layout.size))
