"""A lock that a fork leaves free in the child, and what it guards whole."""

from __future__ import annotations

import os
import threading
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


def _after_fork_in_parent() -> None:
    for lock in _taken:
        lock._lock.release()
    _taken.clear()
    _registry.release()


def _after_fork_in_child() -> None:
    """Who forked is here, and gives back what it took; of who held the others, nobody is."""
    taken = set(map(id, _taken))
    for lock in _all:
        if id(lock) in taken:
            lock._lock.release()
        else:
            lock._lock = threading.RLock()
    _taken.clear()
    _registry.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
