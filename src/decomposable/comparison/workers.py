"""Processes that train one part of a comparison after the other, each with its share of the cores.

    parent ── ("part", what to train) ──▶ worker
           ◀─ ("line", progress), ("said", text) ···········
           ◀─ ("done", record) or ("failed", reason) or ("stopped", reason)
           ── ("stop",) ──▶  the training under way writes its checkpoint and ends

A worker takes no signals but through its parent: the terminal's Ctrl-C would otherwise reach it a second time, which
means "at once". Where the parent is gone, a worker ends in the same way.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch

from decomposable.errors import DecomposableError
from decomposable.files import write_atomically
from decomposable.interrupts import Interrupted
from decomposable.progress import Progress, Report
from decomposable.training.runs import RunFolder

SECONDS_BETWEEN_LINES = 0.5
Train = Callable[[Any, Report, Callable[[str], None]], dict[str, Any]]
"""Train a part, telling how far it is, and what stays; its record comes back."""


def threads_for(jobs: int) -> int:
    """The share of each of some trainings side by side in the threads that there are; one alone keeps all."""
    return torch.get_num_threads() if jobs == 1 else max(1, cores() // jobs)


def cores() -> int:
    """Those that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def reason_of(error: BaseException, folder: RunFolder) -> str:
    """Why a training failed, in one line; what is not an error of ours leaves its traceback in the folder."""
    if isinstance(error, DecomposableError | OSError):
        return str(error)
    first = (str(error).splitlines() or [""])[0][:200]
    try:
        path = folder.path / "error.txt"
        write_atomically(path, "".join(traceback.format_exception(error)).encode())
    except OSError:
        return f"{type(error).__name__}: {first}"
    return f"{type(error).__name__}: {first} (more in {path})"


class Worker:
    """One process, seen from the parent."""

    def __init__(self, train: Train, threads: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, train, os.getpid(), threads), daemon=False)
        resource_tracker.ensure_running()  # else the first start does that, which lets signals through again
        with _no_interrupts():
            self.process.start()
        theirs.close()
        self.part: Any = None
        self._has_been_asked = False

    def begin(self, part: Any) -> None:
        """Train this one."""
        self.part = part
        self.connection.send(("part", part))

    def ask_to_stop(self) -> None:
        """Once; the training under way then writes its checkpoint and ends."""
        if not self._has_been_asked:
            self._has_been_asked = True
            with suppress(OSError):  # it has died, which its next message says
                self.connection.send(("stop",))

    def message(self) -> tuple[str, Any]:
        """The next one that has come; a process that is gone says so."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return "died", "its process was killed, perhaps for want of memory"

    def close(self, *, at_once: bool = False) -> None:
        """End the process, which has nothing to do, or must end at once."""
        self.connection.close()  # a worker that waits for its next part ends when it sees this
        if at_once:
            self.process.kill()
        self.process.join()


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """A process that is started here does not see Ctrl-C: until it has a handler, it would end with a traceback.

    Here, a signal that comes meanwhile is seen afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, train: Train, parent: int, threads: int) -> None:
    """The worker: take parts until there are none."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(threads)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    telling = _Telling(connection)
    while True:
        try:
            kind, *content = connection.recv()
        except (EOFError, OSError):
            return
        if kind != "part":
            continue  # asked to stop while there was nothing to do
        part = content[0]
        try:
            (part.path / "error.txt").unlink(missing_ok=True)  # of an earlier try
            answer: tuple[str, Any] = ("done", train(part, telling, telling.say))
        except Interrupted as error:
            answer = ("stopped", str(error))
        except Exception as error:  # whatever the code of a recipe raises
            answer = ("failed", reason_of(error, part.folder))
        try:
            connection.send(answer)
        except OSError:
            return


class _Telling:
    """The progress of a worker's training; on the way it looks whether it should stop."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self._last = connection, 0.0

    def __call__(self, line: Progress) -> None:
        """Tell how far it is, now and then."""
        if time.monotonic() - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = time.monotonic()
        try:
            if self.connection.poll():
                self.connection.recv()
                signal.raise_signal(signal.SIGTERM)  # as if it ran alone and was asked to stop
            self.connection.send(("line", line))
        except (EOFError, OSError):
            pass  # the parent is gone, which `_watch` notices

    def say(self, text: str) -> None:
        """Tell something that stays."""
        with suppress(OSError):
            self.connection.send(("said", text))


def _watch(parent: int) -> None:
    """Where the parent was killed: stop, with a checkpoint."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
