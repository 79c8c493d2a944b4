"""Writing files so that a reader never sees half of one, and a crash leaves the old one."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, in the same folder; at the end it takes the place of `path` at once, or is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # One of its own for every call: other threads, or other machines that share the folder, may be writing it as well.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{secrets.randbits(40)}")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut could leave the new name with no content
        unfinished.replace(path)
        _sync_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Have the new name on the disk as well, where the system can do that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        except OSError:
            pass  # some file systems cannot; the file itself is written
        finally:
            os.close(handle)


def sweep(path: Path) -> None:
    """Remove what a process that was killed left of this file; nobody else may be writing it."""
    name = re.compile(re.escape(f".{path.name}.") + r"\d+(\.\d+)?")
    for unfinished in path.parent.iterdir():
        if name.fullmatch(unfinished.name):
            unfinished.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """The whole file or none of it."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)
