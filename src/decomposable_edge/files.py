"""Writing files so that a reader never sees half of one, and a crash leaves the old one."""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from decomposable_edge.locks import lock_file, unlock_file

_SECONDS_OF_OTHERS = 86_400.0  # what cannot be seen to be abandoned is, after a day
_A_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_MOST_LETTERS = 40  # of a target's name in that of its folder: names have an end


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, on the same disk; at the end it takes the place of `path` at once, or is removed.

    It lies in a folder of its own beside `path`, which holds whatever a writer leaves there, too. What processes that
    were killed have left in the same place is removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    with _workshop(path) as folder:
        unfinished = folder / path.name
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut could leave the new name with no content
        unfinished.replace(path)
        _sync_folder(path.parent)


@contextmanager
def _workshop(path: Path) -> Iterator[Path]:
    """A new folder, locked as long as this process lives: the system lets go of a lock when a process is killed."""
    while True:
        # One of its own for every call: other threads, or other machines that share the folder, may be writing as well.
        name = f".{path.name[:_MOST_LETTERS]}.{_machine()}-{os.getpid()}-{secrets.token_hex(5)}.unfinished"
        folder = path.with_name(name)
        folder.mkdir()
        handle = _lock(folder)
        if folder.is_dir():  # else another process has swept it before it was locked
            break
        unlock_file(handle)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        unlock_file(handle)


_NAME = re.compile(r"\..*\.([0-9a-f]{8})-\d+-[0-9a-f]{10}\.unfinished", re.DOTALL)


def sweep(folder: Path) -> None:
    """Remove what processes that were killed while they wrote a file have left in a folder; what is in use stays."""
    with suppress(OSError), os.scandir(folder) as entries:
        found = {Path(entry.path): match[1] for entry in entries if (match := _NAME.fullmatch(entry.name))}
        for unfinished, machine in found.items():
            with suppress(OSError):
                _remove_if_abandoned(unfinished, machine == _machine())


def _remove_if_abandoned(unfinished: Path, is_ours: bool) -> None:
    handle = None
    try:  # locks do not reach other machines on every file system
        handle = _lock(unfinished, wait=False) if is_ours else None
        if handle is not None or time.time() - unfinished.stat().st_mtime > _SECONDS_OF_OTHERS:
            shutil.rmtree(unfinished, ignore_errors=True)
    finally:
        unlock_file(handle)


def _lock(folder: Path, *, wait: bool = True) -> int | None:
    try:
        return lock_file(folder, wait=wait, flags=_A_FOLDER)
    except FileNotFoundError:
        return None  # another process has just swept it


def _machine() -> str:
    """Eight digits for this machine's name."""
    return f"{zlib.crc32(platform.node().encode()):08x}"


def _sync_folder(folder: Path) -> None:
    """Have the new name on the disk as well, where the system can do that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            with suppress(OSError):  # some file systems cannot; the file itself is written
                os.fsync(handle)
        finally:
            os.close(handle)


def write_atomically(path: Path, content: bytes) -> None:
    """The whole file or none of it."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)
