"""Arrays in a file of numpy (.npy, .npz), read with no memory for what it merely claims, and with no code run."""

from __future__ import annotations

import math
import stat
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.file.container import Array

_MOST_ENTRIES, _MOST_DIRECTORY = 1000, 1_000_000


def read_arrays(path: Path) -> Array | dict[str, Array]:
    """The array of a file of ``numpy.save``, or those of ``numpy.savez`` by name."""
    allowed = "allowed: a file of numpy.save with an array of numbers, or of numpy.savez with several by name"
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
        raise InvalidArgumentError(f"{path}: not an ordinary file; {allowed}")
    try:
        if zipfile.is_zipfile(path):
            return _several(path)
        with path.open("rb") as file:
            return _one(file, path.stat().st_size)
    except OSError:
        raise
    except Exception as error:  # numpy reads the header as a piece of Python, which fails in many ways
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise InvalidArgumentError(f"{path}: not an array ({reason}); {allowed}") from error


def _several(path: Path) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    _check_directory(path)
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if not entries:
            raise ValueError("it is an archive of nothing")
        # Compressed, a small file could claim any memory; and so could many entries for the same bytes.
        if any(e.compress_type != zipfile.ZIP_STORED or e.file_size != e.compress_size for e in entries):
            raise ValueError("it is compressed")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ValueError("it claims more than it holds")
        for entry in entries:
            with archive.open(entry) as file:
                arrays[entry.filename.removesuffix(".npy")] = _one(file, entry.file_size)
    return arrays


def _check_directory(path: Path) -> None:
    """Refuse a directory that would take far more memory than the file: all of it is read before any entry is."""
    with path.open("rb") as file:
        file.seek(-min(42, path.stat().st_size), 2)
        end = file.read()
    is_plain = end[-22:-18] == b"PK\5\6" and end[:4] != b"PK\6\7"  # as numpy ends it, with no comment and no second one
    count, size = int.from_bytes(end[-12:-10], "little"), int.from_bytes(end[-10:-6], "little")
    if not is_plain or count > _MOST_ENTRIES or size > _MOST_DIRECTORY:
        raise ValueError(f"an archive with a directory of {count:,} entries and {size:,} bytes")


def _one(file: IO[bytes], size: int) -> Array:
    """The array that a stream of so many bytes holds."""
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(file)]
    shape, is_fortran, dtype = read(file)
    claimed, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if dtype.kind not in "biufc" or not all(extent >= 0 for extent in shape) or claimed != there:
        raise ValueError(f"shape {shape!s:.80} of {dtype!s:.40} in {there:,} bytes")
    return np.frombuffer(bytearray(file.read(there)), dtype).reshape(shape, order="F" if is_fortran else "C")
