"""A file that stays where it is: checked as a whole when it is opened, and block by block whenever some of it is read.

What is read of it need not fit into memory, nor be read at once: a size takes the bytes of that size. The blocks'
sums are taken while the checksum of the whole is; so bytes that are read later are those that were checked.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import threading
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decomposable_edge.errors import ArtifactError
from decomposable_edge.fields import require

Array = NDArray[Any]
BLOCK = 1 << 18  # bytes that are read and checked as one


class Source:
    """The bytes of an open file; `digest` is the SHA-256 of all but the last `without` of them.

    Any number of threads may read.
    """

    def __init__(self, path: str | os.PathLike[str], *, most: int, without: int) -> None:
        self.path = Path(path)
        found = os.stat(path)
        require(stat.S_ISREG(found.st_mode), "not an ordinary file")  # a pipe would be waited for
        require(found.st_size <= most, f"it has {found.st_size:,} bytes; allowed: {most:,}")
        self._handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._handle)
        self._turns = threading.Lock()  # only where the system cannot read at a place
        self.size = found.st_size
        sha256, left = hashlib.sha256(), max(0, self.size - without)
        self._sums = []
        for begin in range(0, self.size, BLOCK):
            content = self._raw(begin, min(BLOCK, self.size - begin))
            self._sums.append(zlib.crc32(content))
            sha256.update(content[:left])
            left -= min(left, len(content))
        self.digest = sha256.hexdigest()
        self._last: tuple[int, bytes] = (-1, b"")  # small pieces lie side by side

    def read(self, begin: int, count: int) -> bytes:
        """So many bytes from there."""
        buffer = bytearray(count)
        self.read_into(begin, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, begin: int, buffer: memoryview) -> None:
        """As many bytes from there as the buffer takes."""
        done = 0
        while done < len(buffer):
            index, skipped = divmod(begin + done, BLOCK)
            piece = memoryview(self._block(index))[skipped : skipped + len(buffer) - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    def _block(self, index: int) -> bytes:
        number, content = self._last
        if number != index:
            begin = index * BLOCK
            content = self._raw(begin, min(BLOCK, self.size - begin))
            if zlib.crc32(content) != self._sums[index]:
                raise ArtifactError.of(self.path, "it was changed after it was opened")
            self._last = index, content
        return content

    def _raw(self, begin: int, count: int) -> bytes:
        content = b""
        while len(content) < count:
            more = self._piece(begin + len(content), count - len(content))
            if not more:
                raise ArtifactError.of(self.path, "it became shorter after it was opened")
            content = content + more if content else more
        return content

    def _piece(self, begin: int, count: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._handle, count, begin)
        with self._turns:
            os.lseek(self._handle, begin, os.SEEK_SET)
            return os.read(self._handle, count)


class Stored:
    """An array whose values lie in a file; its slices ``[i]``, ``[:n]``, ``[:, :n]`` are read when they are taken."""

    def __init__(self, source: Source, begin: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._source, self._begin = source, begin
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)
        self._row = math.prod(shape[1:]) * dtype.itemsize  # bytes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Array:
        match key:
            case int():
                return self._rows(range(len(self))[key], 1)[0]
            case slice(start=None, step=None):
                return self._rows(0, len(range(len(self))[key]))
            case (slice(start=None, stop=None, step=None), slice(start=None, step=None)):
                return self._columns(len(range(self.shape[1])[key[1]]))
        raise TypeError(f"[{key}]: only [i], [:n] and [:, :n] are read from a file")

    def all(self) -> Array:
        """The whole array."""
        return self._read(0, self.shape)

    def _rows(self, first: int, count: int) -> Array:
        return self._read(first * self._row, (count, *self.shape[1:]))

    def _columns(self, count: int) -> Array:
        """The first of the second axis, some rows at a time: what is not wanted does not stay in memory."""
        values = np.empty((self.shape[0], count, *self.shape[2:]), self.dtype)
        at_once = max(1, BLOCK // max(1, self._row))
        for first in range(0, len(self), at_once):
            rows = min(at_once, len(self) - first)
            if rows == 1:  # it may be long
                values[first] = self._read(first * self._row, values.shape[1:])
            else:
                values[first : first + rows] = self._rows(first, rows)[:, :count]
        values.flags.writeable = False
        return values

    def _read(self, offset: int, shape: tuple[int, ...]) -> Array:
        values = np.empty(shape, self.dtype)
        if values.size:
            self._source.read_into(self._begin + offset, values.reshape(-1).view(np.uint8).data)
        values.flags.writeable = False
        return values


def in_memory(array: Array | Stored) -> Array:
    """All values of an array."""
    return array.all() if isinstance(array, Stored) else array
