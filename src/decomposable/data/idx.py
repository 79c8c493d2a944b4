"""The idx format of the MNIST family: a big-endian header, then bytes; gzipped or not.

The header is 00 00 08 (bytes) and the number of dimensions, which is 2051 for images and 2049 for labels, then the
size of each dimension in four bytes.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from decomposable.errors import DataError

_BYTES = 0x08
_GZIP = b"\x1f\x8b"


def read(file: Path, *, shape: tuple[int, ...], most: int) -> np.ndarray:
    """An array of 1 to `most` items of this shape. No more is inflated than such a header can claim."""
    try:
        with file.open("rb") as raw:
            is_gzipped = raw.read(2) == _GZIP  # and not by name: browsers unpack some downloads and keep theirs
            raw.seek(0)
            if not is_gzipped:
                return _parse(raw, file, shape, most)
            with gzip.open(raw) as inflated:
                return _parse(cast(BinaryIO, inflated), file, shape, most)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({error})") from error


def _parse(stream: BinaryIO, file: Path, shape: tuple[int, ...], most: int) -> np.ndarray:
    dimensions = 1 + len(shape)
    magic = _BYTES << 8 | dimensions
    allowed = f"allowed: an idx file ({magic}) of 1 to {most:,} {_times(shape)}"
    size = 4 * (1 + dimensions)
    header = stream.read(size)
    if len(header) < size:
        raise DataError(f"{file}: {len(header)} bytes, shorter than a header; {allowed}")
    found, count, *rest = struct.unpack(f">{1 + dimensions}I", header)
    if found != magic:
        raise DataError(f"{file}: begins with {found}; {allowed}")
    if tuple(rest) != shape or not 1 <= count <= most:
        raise DataError(f"{file}: the header says {count:,} {_times(rest)}; {allowed}")
    expected = int(count * np.prod(shape, dtype=np.int64))
    content = stream.read(expected + 1)
    if len(content) != expected:
        came = f"only {len(content):,}" if len(content) < expected else "more"
        raise DataError(f"{file}: the header says {expected:,} bytes and {came} follow; {allowed}")
    return np.frombuffer(content, dtype=np.uint8).reshape(count, *shape).copy()  # a copy can be written to


def _times(shape: tuple[int, ...] | list[int]) -> str:
    return f"images of {' × '.join(map(str, shape))}" if shape else "labels"
