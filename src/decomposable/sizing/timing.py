"""Timing several functions side by side."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from decomposable.errors import InvalidArgumentError

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
