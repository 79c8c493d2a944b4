"""One training after the other, or some side by side, each after those that it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import wait

from decomposable.comparison.parts import Part
from decomposable.comparison.watching import Watch
from decomposable.comparison.workers import Train, Worker, reason_of, threads_for
from decomposable.interrupts import Interrupted, stop_signals
from decomposable.progress import Progress
from decomposable.training.runs import RunFolder

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
    failures: Failures = {}
    waiting = list(parts)
    workers: list[Worker] = []
    is_clean = False
    try:
        with stop_signals() as stop:
            while True:
                busy = [worker for worker in workers if worker.part is not None]
                while not stop.is_set() and len(busy) < jobs:
                    part = _next(waiting, [worker.part for worker in busy], failures, watch)
                    if part is None:
                        break
                    worker = next((w for w in workers if w.part is None), None) or Worker(train, threads_for(jobs))
                    workers += [] if worker in workers else [worker]
                    watch.begin(part)
                    worker.begin(part)
                    busy.append(worker)
                if not busy:
                    break
                if stop.is_set():
                    for worker in busy:
                        worker.ask_to_stop()
                for worker in _speaking(busy):
                    if not _heard(worker, failures, watch, is_stopping=stop.is_set()):
                        workers.remove(worker)
                watch.show()
            is_clean = True
            if stop.is_set():
                raise _stopped(watch)
    finally:
        for worker in workers:
            worker.close(at_once=not is_clean)
    return failures


def _heard(worker: Worker, failures: Failures, watch: Watch, *, is_stopping: bool) -> bool:
    """Take the next message of a worker; whether there will be others."""
    kind, content = worker.message()
    if kind == "line":
        watch.hear(worker.part, Progress.of(content))
        return True
    if kind == "said":
        watch.tell(worker.part, content)
        return True
    part, worker.part = worker.part, None
    if kind == "done":
        watch.end(part, content)
    elif kind == "stopped" or is_stopping:
        watch.stop(part)
    else:
        failures[part.name] = content
        watch.fail(part, content)
    return kind != "died"


def _speaking(workers: Sequence[Worker]) -> list[Worker]:
    """Those that have something to say; waits half a second for one, so that a signal is seen."""
    ready = wait([worker.connection for worker in workers], timeout=0.5)
    return [worker for worker in workers if worker.connection in ready]


def _next(waiting: list[Part], running: Sequence[Part], failures: Failures, watch: Watch) -> Part | None:
    """The first part that has what it needs; it is taken off the list."""
    for part in list(waiting):
        to_come = {other.path for other in (*waiting, *running)}
        if any(path in to_come for path in part.needs):
            continue
        waiting.remove(part)
        if not _lacks_something(part, failures, watch):
            return part
    return None


def _lacks_something(part: Part, failures: Failures, watch: Watch) -> bool:
    """Whether what it starts from has failed; then it has, too."""
    absent = [path for path in part.needs if not RunFolder(path).record.exists()]
    if absent:
        failures[part.name] = f"{'/'.join(absent[0].parts[-2:])}, which it starts from, is not there"
        watch.fail(part, failures[part.name])
    return bool(absent)


def _stopped(watch: Watch) -> Interrupted:
    left = watch.total - watch.done
    return Interrupted(f"stopped with {left} of {watch.total} trainings to go; the same command goes on with them")
