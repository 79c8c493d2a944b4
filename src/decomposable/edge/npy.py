"""An array in a file of numpy (.npy), read with no memory for what it merely claims, and with no code run."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from decomposable.edge.arrays import Array
from decomposable.errors import InvalidArgumentError


def read_npy(path: Path) -> Array:
    """The array of a file of ``numpy.save``."""
    allowed = "allowed: a file of numpy.save, with an array of numbers"
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
        raise InvalidArgumentError(f"{path}: not an ordinary file; {allowed}")
    try:
        with path.open("rb") as file:
            read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(file)]
            shape, is_fortran, dtype = read(file)
            claimed, there = math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size - file.tell()
            if dtype.kind not in "biufc" or not all(size >= 0 for size in shape) or claimed != there:
                raise ValueError(f"shape {shape!s:.80} of {dtype!s:.40} in {there:,} bytes")
            content = np.fromfile(file, dtype=dtype)
    except OSError:
        raise
    except Exception as error:  # numpy reads the header as a piece of Python, which fails in many ways
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise InvalidArgumentError(f"{path}: not an array ({reason}); {allowed}") from error
    return content.reshape(shape, order="F" if is_fortran else "C")
