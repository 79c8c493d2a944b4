"""One training after the other, or some side by side, each after those that it starts from."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import wait

from decomposable.comparison.parts import Part
from decomposable.comparison.watching import Watch
from decomposable.comparison.workers import Train, Worker, reason_of, threads_for
from decomposable.interrupts import Interrupted, stop_signals
from decomposable.progress import Progress

Failures = dict[str, str]  # why, by the name of the part


def one_by_one(parts: Sequence[Part], train: Train, watch: Watch) -> Failures:
    """In this process, one after the other; what failed comes back, with the reason."""
    failures: Failures = {}
    for part in parts:
        if _lacks_something(part, failures, watch):
            continue

        def report(line: Progress, part: Part = part) -> None:
            watch.hear(part, line)
            watch.show()

        watch.begin(part)
        try:
            watch.end(part, train(part, report, partial(watch.tell, part)))
        except Interrupted as error:
            raise _stopped(watch) from error
        except Exception as error:  # whatever the code of a recipe raises
            failures[part.name] = reason_of(error, part.folder)
            watch.fail(part, failures[part.name])
    return failures


def side_by_side(parts: Sequence[Part], train: Train, watch: Watch, *, jobs: int) -> Failures:
    """Some at a time, each in a process with its share of the cores."""
    pool = _Pool(parts, train, watch, jobs)
    try:
        with stop_signals() as stop:
            pool.work(stop)
    finally:
        pool.close()
    return pool.failures


class _Pool:
    """The parts that wait to be trained, and the workers that train the others."""

    def __init__(self, parts: Sequence[Part], train: Train, watch: Watch, jobs: int) -> None:
        self.waiting, self.train, self.watch, self.jobs = list(parts), train, watch, jobs
        self.workers: list[Worker] = []
        self.failures: Failures = {}

    @property
    def busy(self) -> list[Worker]:
        """The workers that train."""
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
            speaking = wait([worker.connection for worker in self.busy], timeout=0.5)  # so that a signal is seen
            for worker in [worker for worker in self.busy if worker.connection in speaking]:
                if not self._heard(worker, is_stopping=stop.is_set()):
                    self.workers.remove(worker)
            self.watch.show()
        if stop.is_set():
            raise _stopped(self.watch)

    def close(self) -> None:
        """End all processes; one that trains was not waited for, and ends at once."""
        for worker in self.workers:
            worker.close(at_once=worker.part is not None)

    def _begin(self) -> None:
        """Give parts that have what they need to workers, as many as there may be."""
        while len(self.busy) < self.jobs:
            part = self._next()
            if part is None:
                return
            self.watch.begin(part)
            if all(worker.part is not None for worker in self.workers):
                self.workers.append(Worker(self.train, threads_for(self.jobs)))
            next(worker for worker in self.workers if worker.part is None).begin(part)

    def _next(self) -> Part | None:
        """The first part that has what it needs; it is taken off the list."""
        for part in list(self.waiting):
            to_come = {other.path for other in (*self.waiting, *(worker.part for worker in self.busy))}
            if any(path in to_come for path in part.needs):
                continue
            self.waiting.remove(part)
            if not _lacks_something(part, self.failures, self.watch):
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
            self.failures[part.name] = content
            self.watch.fail(part, content)
        return kind != "died"


def _lacks_something(part: Part, failures: Failures, watch: Watch) -> bool:
    """Whether what it starts from has failed; then it has, too."""
    if part.lacks:
        failures[part.name] = f"{'/'.join(part.lacks[0].parts[-2:])}, which it starts from, is not there"
        watch.fail(part, failures[part.name])
    return bool(part.lacks)


def _stopped(watch: Watch) -> Interrupted:
    left = watch.total - watch.done
    return Interrupted(f"stopped with {left} of {watch.total} trainings to go; the same command goes on with them")
