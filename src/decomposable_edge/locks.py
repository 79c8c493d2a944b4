"""Locks between threads, which survive a fork, and between processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

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


def _after_fork() -> None:
    for lock in _taken:
        lock._lock.release()
    _taken.clear()
    _registry.release()


def _after_fork_in_child() -> None:
    for lock in set(_all).difference(_taken):  # the threads that hold these are not here
        lock._lock = threading.RLock()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


@contextmanager
def holding(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock file, which is there meanwhile; `BlockingIOError` where another has it and this is not to `wait`.

    The system frees it when a process ends, however that is. A device without `filelock` holds nothing: of two
    processes that change a file at the same moment there, one may lose its change, and the file is whole all the same.
    """
    try:
        from filelock import FileLock, Timeout
    except ImportError:
        yield
        return
    lock = FileLock(path, blocking=wait)
    try:
        lock.acquire()
    except Timeout as error:
        raise BlockingIOError(f"{path}: another process holds it") from error
    try:
        yield
    finally:
        with suppress(OSError):  # of Windows, which removes no open file
            path.unlink()  # before it is let go: who waits for it sees that it is gone, and makes a new one
        lock.release()
