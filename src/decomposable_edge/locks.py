"""Locks between threads and between processes, and what a fork makes of them.

A lock on a file or folder is the system's: it goes with the process that holds it, however that ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from weakref import WeakSet

from decomposable_edge.errors import DecomposableError

fcntl: ModuleType | None = None
with suppress(ImportError):  # not on Windows
    import fcntl

PATIENCE = 10.0  # seconds to wait for another process that is writing; it takes milliseconds

_MOST_SECONDS = 10.0  # that a fork waits for work under a lock to end


class ForkLock:
    """A lock that one thread may take several times. A fork waits for its holder, so that the child finds nothing half
    done; and in the child it is free, though the thread that held it is not there.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        with _registry:
            _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


_registry = threading.Lock()
_all: WeakSet[ForkLock] = WeakSet()
_taken: list[ForkLock] = []  # by the thread that is forking


def _before_fork() -> None:
    _registry.acquire()
    _taken[:] = [lock for lock in _all if lock._lock.acquire(timeout=_MOST_SECONDS)]


def _after_fork_in_parent() -> None:
    for lock in _taken:
        lock._lock.release()
    _taken.clear()
    _registry.release()


def _after_fork_in_child() -> None:
    """Who forked is here, and gives back what it took; of who held the others, nobody is. Files stay the parent's."""
    taken = set(map(id, _taken))
    for lock in _all:
        if id(lock) in taken:
            lock._lock.release()
        else:
            lock._lock = threading.RLock()
    _taken.clear()
    _registry.release()
    for handle in _handles:
        os.close(handle)
    _handles.clear()


_handles: set[int] = set()  # of files and folders whose lock this process holds or waits for


def lock_file(path: Path, *, wait: bool = True, flags: int = os.O_RDONLY, with_others: bool = False) -> int | None:
    """Open a file or folder and take its lock; None where there are no locks. `BlockingIOError` where it is held.

    Several may have it `with_others`, as long as nobody has it alone.

    A child of this process does not keep the lock: it must not hold what its parent, killed, has left.
    """
    if fcntl is None:
        return None
    handle = os.open(path, flags, 0o666)
    _handles.add(handle)
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if with_others else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        unlock_file(handle)
        raise
    except OSError:  # a file system without locks
        unlock_file(handle)
        return None
    return handle


def unlock_file(handle: int | None) -> None:
    """Let go of what `lock_file` gave."""
    if handle in _handles:
        _handles.discard(handle)
        os.close(handle)


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Wait until no other process changes the file, and keep others waiting; a file beside it says so meanwhile.

    The folder itself is not locked: a training run may hold it for days.
    """
    beside = path.with_name(f".{path.name}.lock")
    if fcntl is None:
        handle = _created(beside)
        try:
            yield
        finally:
            os.close(handle)  # before: Windows removes no file that is open
            beside.unlink(missing_ok=True)
        return
    while (held := lock_file(beside, flags=os.O_CREAT | os.O_RDWR)) is not None and not _is_still(beside, held):
        unlock_file(held)
    try:
        yield
    finally:
        beside.unlink(missing_ok=True)  # before others get it: they see that it is gone, and make a new one
        unlock_file(held)


def _is_still(path: Path, handle: int) -> bool:
    """Whether the open file is the one at that path: who held it before has removed it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


def _created(path: Path) -> int:
    """A file that was not there."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except FileExistsError as error:
            if time.monotonic() > end:
                raise DecomposableError(
                    f"{path}: another process is writing; if there is none, remove this file"
                ) from error
        time.sleep(0.01)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
