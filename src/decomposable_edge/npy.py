"""Arrays in a file of numpy (.npy, .npz), of which no code is run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.file.container import Array
from decomposable_edge.text import first_line


def read_arrays(path: Path) -> Array | dict[str, Array]:
    """Return the array of a file of ``numpy.save``, or those of ``numpy.savez`` by name."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError("not an ordinary file")
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            return _checked(loaded)
        with loaded:
            return {name: _checked(array) for name, array in loaded.items()}
    except OSError:
        raise
    except Exception as error:  # numpy reads the header as a piece of Python, which fails in many ways
        raise InvalidArgumentError(
            f"{path}: not an array ({first_line(error, 120)}); allowed: a file of numpy.save with an array of numbers, "
            "or of numpy.savez with several by name"
        ) from error


def _checked(value: object) -> Array:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":  # of an archive, anything may come
        raise ValueError(f"it holds {getattr(value, 'dtype', 'bytes')!s:.40}")
    return value
