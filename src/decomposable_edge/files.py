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

_SECONDS_OF_OTHERS = 86_400.0  # after a day, what another machine has not finished is abandoned
_MOST_LETTERS = 40  # of a target's name in that of its folder: names have an end
_NAME = re.compile(r"\..*\.([0-9a-f]{8})-(\d{1,9})-[0-9a-f]{10}\.unfinished", re.DOTALL)

_in_use: set[Path] = set()  # the folders that this process is writing in


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to, on the same disk; at the end it takes the place of `path` at once, or is removed.

    It lies in a folder of its own beside `path`, which holds whatever a writer leaves there, too. What processes that
    were killed have left in the same place is removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    # One of its own for every call: other threads, or other machines that share the folder, may be writing as well.
    name = f".{path.name[:_MOST_LETTERS]}.{_machine()}-{os.getpid()}-{secrets.token_hex(5)}.unfinished"
    folder = path.with_name(name)
    _in_use.add(folder)
    try:
        folder.mkdir()
        unfinished = folder / path.name
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut could leave the new name with no content
        unfinished.replace(path)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _in_use.discard(folder)


def write_atomically(path: Path, content: bytes) -> None:
    """Write the whole file or none of it."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


def sweep(folder: Path) -> None:
    """Remove what processes that were killed while they wrote a file have left in a folder; what is in use stays."""
    with suppress(OSError):
        for name in os.listdir(folder):
            match = _NAME.fullmatch(name)
            with suppress(OSError):
                if match and _is_abandoned(folder / name, match[1], int(match[2])):
                    shutil.rmtree(folder / name, ignore_errors=True)


def _is_abandoned(unfinished: Path, machine: str, process: int) -> bool:
    """Return whether nobody writes there any more: its process has ended, or nothing happened for a day."""
    if process == os.getpid() and machine == _machine():
        return unfinished not in _in_use  # an earlier process had the same number
    if machine == _machine() and os.name == "posix":
        try:
            os.kill(process, 0)  # sends nothing, and fails where there is no such process
        except ProcessLookupError:
            return True
        except PermissionError:  # of another user
            pass
    return time.time() - unfinished.stat().st_mtime > _SECONDS_OF_OTHERS


def _machine() -> str:
    """Return eight digits for this machine, or this container of it, whose processes have numbers of their own."""
    container = 0
    with suppress(OSError):
        container = os.stat("/proc/self/ns/pid").st_ino
    return f"{zlib.crc32(f'{platform.node()} {container}'.encode()):08x}"


def _sync_folder(folder: Path) -> None:
    """Have the new name on the disk as well, where the system can do that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            with suppress(OSError):  # some file systems cannot; the file itself is written
                os.fsync(handle)
        finally:
            os.close(handle)
