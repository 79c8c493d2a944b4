"""Timing several functions side by side, and the machine they ran on. A device without torch uses this too."""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from decomposable.errors import InvalidArgumentError
from decomposable.ranks import is_integer

WARM_UP = 2
"""Calls of every function that do not count: the first ones choose kernels and take memory."""


@dataclass(frozen=True)
class Sample:
    """How long every call of one function took, in seconds."""

    seconds: tuple[float, ...]

    @property
    def repetitions(self) -> int:
        """How often it was called."""
        return len(self.seconds)

    @property
    def quartiles_ms(self) -> tuple[float, float, float]:
        """Between which the middle half of the calls lies, and the median between them, in milliseconds.

        >>> Sample((0.004, 0.001, 0.002, 0.003, 0.005)).quartiles_ms
        (2.0, 3.0, 4.0)
        """
        if len(self.seconds) == 1:
            return (1e3 * self.seconds[0],) * 3
        low, median, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return 1e3 * low, 1e3 * median, 1e3 * high


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    least: int = 5,
    most: int = 1000,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Sample]:
    """Time every function, all of them once in every round, so that a slow moment of the machine slows all alike.

    Rounds go on until `seconds` have passed, but there are at least `least` and at most `most` of them. The order
    changes from round to round, because a function may leave the caches in a state that suits the next one.

    >>> samples = interleaved({"a": lambda: None, "b": lambda: None}, seconds=0, least=3)
    >>> {name: sample.repetitions for name, sample in samples.items()}
    {'a': 3, 'b': 3}
    """
    if not (0 <= seconds < float("inf") and 1 <= least <= most):
        raise InvalidArgumentError(
            f"seconds={seconds!r}, least={least!r}, most={most!r}; allowed: seconds from 0, and 1 <= least <= most"
        )
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    end, rounds = clock() + seconds, 0
    while rounds < least or (rounds < most and clock() < end):
        shuffle(order)
        for name in order:
            start = clock()
            runs[name]()
            taken[name].append(clock() - start)
        rounds += 1
    return {name: Sample(tuple(values)) for name, values in taken.items()}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What times depend on most: the processor, and how many cores of it there are."""

    cpu: str
    cores: int

    @classmethod
    def here(cls) -> Machine:
        """The one that this runs on."""
        cpu = platform.processor() or platform.machine() or "unknown"
        cpuinfo = Path("/proc/cpuinfo")
        if cpuinfo.exists():
            lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line]
            cpu = next(filter(None, names), cpu)
        return cls(cpu=cpu, cores=os.cpu_count() or 1)

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} core{'s' if self.cores > 1 else ''}"


def most_threads() -> int:
    """How many threads are allowed here, 4 for each core: runtimes crash or hang when they start very many."""
    return 4 * (os.cpu_count() or 1)


def check_threads(threads: object) -> int:
    """A number of threads that makes sense on this machine.

    >>> check_threads(1)
    1
    """
    if is_integer(threads) and 1 <= threads <= most_threads():  # type: ignore[operator]
        return int(threads)  # type: ignore[call-overload]
    raise InvalidArgumentError(f"threads={threads!r:.40}; allowed: an int from 1 to {most_threads()}, 4 for each core")


def now() -> str:
    """The date and time, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
