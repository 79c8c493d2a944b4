"""The trainings of a comparison as tasks of a Ray cluster, which all have the folder of the comparison.

A task is one training. Where the process or the machine of one dies, Ray starts it again somewhere, and it goes on from
its checkpoint. What a task says on its way goes through a mailbox, an actor of the cluster:

    here ── task(part) ──▶ a process of the cluster
         ◀─ mailbox ◀───── ("line", progress), ("said", text) ···········
         ── mailbox ─────▶ stop, which a task learns when it tells how far it is
         ◀──────────────── ("done", record) or ("failed", reason) or ("stopped", reason), the task's result
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from decomposable.progress import Progress
from decomposable_edge.errors import DecomposableError, MissingExtraError
from decomposable_edge.text import first_line
from decomposable_lab.comparison.parts import TrainingJob
from decomposable_lab.comparison.scheduling import SECONDS_BETWEEN_LINES, Train, Worker, answer, work_off
from decomposable_lab.comparison.watching import Failures, Watch

RETRIES = 3  # of a training whose process or machine died


def on_ray(
    parts: Sequence[TrainingJob], train: Train, watch: Watch, *, jobs: int, address: str | None, on_gpu: bool
) -> Failures:
    """Train all parts on a cluster, that of the address or, without one, one that is started here for them."""
    ray = _ray()
    was_there = ray.is_initialized()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # this package tells nobody that it is used
    try:
        if not was_there:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # of many kinds: no such host, another version, …
        raise DecomposableError(f"--address {address}: no Ray cluster answers there ({first_line(error)})") from error
    try:
        return work_off(parts, watch, jobs, _Cluster(train, _threads(ray, jobs), on_gpu))
    finally:
        if not was_there:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray  # optional: here, so that everybody else needs none
    except ImportError as error:
        raise MissingExtraError.of("Ray", "ray", "./laboratory") from error
    return ray


def _threads(ray: Any, jobs: int) -> int:
    """The share of each of so many trainings in the cores of the cluster, and no more than its smallest machine has."""
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    cores = [count for count in cores if count > 0] or [1]
    return max(1, min(min(cores), sum(cores) // jobs))


class _Mailbox:
    """What tasks have said and nobody has heard yet, and which of them are to stop."""

    def __init__(self) -> None:
        self._said: list[tuple[int, tuple[str, Any]]] = []
        self._to_stop: set[int] = set()

    def tell(self, key: int, message: tuple[str, Any]) -> bool:
        """Take a message of a task; whether it is to stop."""
        self._said.append((key, message))
        return key in self._to_stop

    def take(self) -> list[tuple[int, tuple[str, Any]]]:
        """Return all messages since the last call."""
        said, self._said = self._said, []
        return said

    def stop(self, key: int) -> None:
        """Have a task stop."""
        self._to_stop.add(key)


class _Cluster:
    """Workers each of which is a task at a time."""

    def __init__(self, train: Train, threads: int, on_gpu: bool) -> None:
        self._ray = _ray()
        self.mailbox = self._ray.remote(num_cpus=0)(_Mailbox).remote()
        resources = {"num_cpus": threads, **({"num_gpus": 1} if on_gpu else {})}
        self._task = self._ray.remote(max_retries=RETRIES, **resources)(_work)
        self._train, self._threads = train, threads
        self._workers: dict[int, _Task] = {}

    def worker(self) -> _Task:
        """Return a new one."""
        return _Task(self)

    def start(self, worker: _Task, part: TrainingJob) -> tuple[int, Any]:
        """Begin a task for a worker; by the number, its messages are known."""
        key = len(self._workers)
        self._workers[key] = worker
        task = self._task.options(name=part.name)
        return key, task.remote(part, self._train, self.mailbox, key, self._threads)

    def result(self, reference: Any) -> tuple[str, Any]:
        """Return how a task has ended."""
        try:
            ended: tuple[str, Any] = self._ray.get(reference)
            return ended
        except Exception as error:  # its process died again and again, or what it sent cannot be read
            return "died", f"its task was lost: {first_line(error)}"

    def stop(self, key: int) -> None:
        """Have a task stop at its next word."""
        self.mailbox.stop.remote(key)

    def cancel(self, reference: Any) -> None:
        """End a task at once."""
        with suppress(Exception):
            self._ray.cancel(reference, force=True)

    def speaking(self, workers: Sequence[_Task], timeout: float) -> list[Worker]:
        """Return those that have said something, or have ended."""
        for key, message in self._ray.get(self.mailbox.take.remote()):
            if self._workers[key].key == key:  # else it has ended, and all that counts was in its result
                self._workers[key].said.append(message)
        has_words = any(worker.said for worker in workers)
        references = [worker.reference for worker in workers]
        ended, _ = self._ray.wait(references, num_returns=1, timeout=0 if has_words else timeout)
        return [worker for worker in workers if worker.said or worker.reference in ended]


class _Task:
    """One task after the other, seen from here."""

    def __init__(self, cluster: _Cluster) -> None:
        self.cluster = cluster
        self.part: Any = None
        self.key, self.reference = -1, None
        self.said: deque[tuple[str, Any]] = deque()
        self._has_been_asked = False

    def begin(self, part: TrainingJob) -> None:
        """Train this one."""
        self.part, self._has_been_asked = part, False
        self.said.clear()
        self.key, self.reference = self.cluster.start(self, part)

    def ask_to_stop(self) -> None:
        """One that waits for its turn has nothing to write."""
        if not self._has_been_asked:
            self._has_been_asked = True
            self.cluster.stop(self.key)

    def message(self) -> tuple[str, Any]:
        """Return the next word; the last one is how it ended."""
        return self.said.popleft() if self.said else self.cluster.result(self.reference)

    def close(self, *, at_once: bool) -> None:
        """A task that has ended is gone by itself."""
        if at_once:
            self.cluster.cancel(self.reference)


def _work(part: TrainingJob, train: Train, mailbox: Any, key: int, threads: int) -> tuple[str, Any]:
    """Return the task: one training, in a process of the cluster."""
    torch.set_num_threads(threads)
    telling = _Telling(mailbox, key)
    if telling.is_to_stop(("said", f"on {os.uname().nodename}" if hasattr(os, "uname") else "begun")):
        return "stopped", "before it began"
    return answer(part, train, telling, telling.say)


class _Telling:
    """The progress of a task; on the way it looks whether it should stop."""

    def __init__(self, mailbox: Any, key: int) -> None:
        self.mailbox, self.key, self._last = mailbox, key, 0.0

    def is_to_stop(self, message: tuple[str, Any]) -> bool:
        """Tell something; where nobody is there any more to be told, it is to stop."""
        try:
            return bool(_ray().get(self.mailbox.tell.remote(self.key, message)))
        except Exception:  # the mailbox is gone, with the program that made it
            return True

    def __call__(self, line: Progress) -> None:
        """Tell how far it is, now and then."""
        if time.monotonic() - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = time.monotonic()
        if self.is_to_stop(("line", line)):
            signal.raise_signal(signal.SIGTERM)  # as if it ran alone and was asked to stop

    def say(self, text: str) -> None:
        """Tell something that stays."""
        self.is_to_stop(("said", text))
