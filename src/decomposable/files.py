"""Writing files so that a reader never sees half of one, and a crash leaves the old one."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, in the same folder; at the end it takes the place of `path` at once, or is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut could leave the new name with no content
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_plain(path: Path) -> Any:
    """What `torch.save` wrote, read without running code from it; `ValueError` in one line where that cannot be."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"it is damaged, or holds more than tensors and plain values ({reason[:120]})") from error


def write_atomically(path: Path, content: bytes) -> None:
    """The whole file or none of it."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)
