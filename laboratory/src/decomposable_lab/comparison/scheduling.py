"""One training after the other, or some side by side, each after those that it starts from.

Side by side they run in processes that train one part after the other, each with its share of the cores:

    parent ── ("part", what to train) ──▶ worker
           ◀─ ("line", progress), ("said", text) ···········
           ◀─ ("done", record) or ("failed", reason) or ("stopped", reason)
           ── ("stop",) ──▶  the training under way writes its checkpoint and ends

Who the workers are is an `Engine`'s matter: processes of this machine here, those of a cluster in `on_ray.py`; the
messages are the same. A process takes no signals but through its parent: the terminal's Ctrl-C would otherwise reach it
a second time, which means "at once". Where the parent is gone, a worker ends in the same way.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from decomposable.progress import Progress, Report
from decomposable.training.runs import RunFolder
from decomposable_edge.errors import DecomposableError
from decomposable_edge.files import write_atomically
from decomposable_edge.interrupts import Interrupted, stop_signals
from decomposable_edge.machine import usable_cpus
from decomposable_lab.comparison.parts import TrainingJob
from decomposable_lab.comparison.watching import Failures, Watch

SECONDS_BETWEEN_LINES = 0.5
Train = Callable[[TrainingJob, Report, Callable[[str], None]], dict[str, Any]]
"""Train a part, telling how far it is, and what stays; its record comes back."""


def one_by_one(parts: Sequence[TrainingJob], train: Train, watch: Watch) -> Failures:
    """Train in this process, one after the other; return what failed, with the reason."""
    for part in parts:
        if _lacks_something(part, watch):
            continue

        def report(line: Progress, part: TrainingJob = part) -> None:
            watch.hear(part, line)
            watch.show()

        watch.begin(part)
        try:
            watch.end(part, train(part, report, partial(watch.tell, part)))
        except Interrupted as error:
            raise _stopped(watch) from error
        except Exception as error:  # whatever the code of a recipe raises
            watch.fail(part, _reason_of(error, part.folder))
    return watch.failures


def side_by_side(parts: Sequence[TrainingJob], train: Train, watch: Watch, *, jobs: int) -> Failures:
    """Return some at a time, each in a process with its share of the cores."""
    return work_off(parts, watch, jobs, _Processes(train, threads_for(jobs)))


class Worker(Protocol):
    """Train one part after the other."""

    part: Any  # the one under way

    def begin(self, part: TrainingJob) -> None:
        """Train this one."""

    def ask_to_stop(self) -> None:
        """Ask once or more often; the current training then writes its checkpoint and ends."""

    def message(self) -> tuple[str, Any]:
        """Return the next one that has come; of one that is gone, "died" and why."""

    def close(self, *, at_once: bool) -> None:
        """End the worker: there is nothing more to do, or it must end at once."""


class Engine(Protocol):
    """Start workers."""

    def worker(self) -> Worker:
        """Return a new one."""

    def speaking(self, workers: Sequence[Any], timeout: float) -> list[Worker]:
        """Return those of them that have a message; it waits for one, but not longer than so many seconds."""


def work_off(parts: Sequence[TrainingJob], watch: Watch, jobs: int, engine: Engine) -> Failures:
    """Train all parts with the workers of an engine, so many at a time."""
    pool = _Pool(parts, watch, jobs, engine)
    try:
        with stop_signals() as stop:
            pool.work(stop)
    finally:
        for worker in pool.workers:
            worker.close(at_once=worker.part is not None)  # one that trains was not waited for
    return watch.failures


class _Pool:
    """The parts that wait to be trained, and the workers that train the others."""

    def __init__(self, parts: Sequence[TrainingJob], watch: Watch, jobs: int, engine: Engine) -> None:
        self.waiting, self.watch, self.jobs, self.engine = list(parts), watch, jobs, engine
        self.workers: list[Worker] = []

    @property
    def busy(self) -> list[Worker]:
        """Return the workers that train."""
        return [worker for worker in self.workers if worker.part is not None]

    def work(self, stop: threading.Event) -> None:
        """Until all parts are trained or have failed; where it is to stop, until the checkpoints are written."""
        while True:
            if not stop.is_set():
                self._begin()
            if not self.busy:
                break
            if stop.is_set():
                for worker in self.busy:
                    worker.ask_to_stop()
            for worker in self.engine.speaking(self.busy, timeout=0.5):  # not longer, so that a signal is seen
                if not self._heard(worker, is_stopping=stop.is_set()):
                    self.workers.remove(worker)
            self.watch.show()
        if stop.is_set():
            raise _stopped(self.watch)

    def _begin(self) -> None:
        """Give parts that have what they need to workers, as many as there may be."""
        while len(self.busy) < self.jobs:
            part = self._next()
            if part is None:
                return
            self.watch.begin(part)
            if all(worker.part is not None for worker in self.workers):
                self.workers.append(self.engine.worker())
            next(worker for worker in self.workers if worker.part is None).begin(part)

    def _next(self) -> TrainingJob | None:
        """Return the first part that has what it needs; it is taken off the list."""
        for part in list(self.waiting):
            to_come = {other.path for other in (*self.waiting, *(worker.part for worker in self.busy))}
            if any(path in to_come for path in part.needs):
                continue
            self.waiting.remove(part)
            if not _lacks_something(part, self.watch):
                return part
        return None

    def _heard(self, worker: Worker, *, is_stopping: bool) -> bool:
        """Take the next message of a worker; whether there will be others."""
        kind, content = worker.message()
        if kind == "line":
            self.watch.hear(worker.part, Progress.of(content))
            return True
        if kind == "said":
            self.watch.tell(worker.part, content)
            return True
        part, worker.part = worker.part, None
        if kind == "done":
            self.watch.end(part, content)
        elif kind == "stopped" or is_stopping:
            self.watch.stop(part)
        else:
            self.watch.fail(part, content)
        return kind != "died"


def _lacks_something(part: TrainingJob, watch: Watch) -> bool:
    """Return whether what it starts from has failed; then it has, too."""
    lacks = part.lacks
    if lacks:
        watch.fail(part, f"{'/'.join(lacks[0].parts[-2:])}, which it starts from, is not there")
    return bool(lacks)


def _stopped(watch: Watch) -> Interrupted:
    left = watch.total - watch.done
    return Interrupted(f"stopped with {left} of {watch.total} trainings to go; the same command goes on with them")


def threads_for(jobs: int) -> int:
    """Return the share of each of some trainings side by side in the threads that there are; one alone keeps all."""
    return torch.get_num_threads() if jobs == 1 else max(1, len(usable_cpus()) // jobs)


def _reason_of(error: BaseException, folder: RunFolder) -> str:
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


class _Processes:
    """Workers that are processes of this machine, each with so many threads."""

    def __init__(self, train: Train, threads: int) -> None:
        self.train, self.threads = train, threads

    def worker(self) -> _Worker:
        """Return a new process."""
        return _Worker(self.train, self.threads)

    def speaking(self, workers: Sequence[_Worker], timeout: float) -> list[Worker]:
        """Return those whose connection has something to read."""
        ready = wait([worker.connection for worker in workers], timeout=timeout)
        return [worker for worker in workers if worker.connection in ready]


class _Worker:
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

    def begin(self, part: TrainingJob) -> None:
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
        """Return the next one that has come; a process that is gone says so."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return "died", "its process was killed, perhaps for want of memory"

    def close(self, *, at_once: bool) -> None:
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
    with suppress(EOFError, OSError):  # of the connection, where the parent is gone
        while True:
            kind, *content = connection.recv()
            if kind == "part":  # else it is asked to stop while there is nothing to do
                connection.send(answer(content[0], train, telling, telling.say))


def answer(part: TrainingJob, train: Train, report: Report, say: Callable[[str], None]) -> tuple[str, Any]:
    """Train a part where one is, and say in the last message how it ended."""
    try:
        (part.path / "error.txt").unlink(missing_ok=True)  # of an earlier try
        return "done", train(part, report, say)
    except Interrupted as error:
        return "stopped", str(error)
    except Exception as error:  # whatever the code of a recipe raises
        return "failed", _reason_of(error, part.folder)


class _Telling:
    """The progress of a worker's training; on the way it looks whether it should stop."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self._last = connection, 0.0

    def __call__(self, line: Progress) -> None:
        """Tell how far it is, now and then."""
        if time.monotonic() - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = time.monotonic()
        with suppress(EOFError, OSError):  # the parent is gone, which `_watch` notices
            if self.connection.poll():
                self.connection.recv()
                signal.raise_signal(signal.SIGTERM)  # as if it ran alone and was asked to stop
            self.connection.send(("line", line))

    def say(self, text: str) -> None:
        """Tell something that stays."""
        with suppress(OSError):
            self.connection.send(("said", text))


def _watch(parent: int) -> None:
    """Where the parent was killed: stop, with a checkpoint."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
