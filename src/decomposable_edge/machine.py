"""The machine that this runs on: what times depend on, and how many threads it takes."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from decomposable_edge.checks import is_integer
from decomposable_edge.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What times depend on most: the processor, and how many cores of it there are."""

    cpu: str
    cores: int

    @classmethod
    def here(cls) -> Machine:
        """Return the one that this runs on."""
        cpu, cpuinfo = platform.processor() or platform.machine() or "unknown", Path("/proc/cpuinfo")
        if cpuinfo.exists():
            found = re.search(r"^model name\s*:\s*(\S.*)$", cpuinfo.read_text("utf-8", "replace"), re.MULTILINE)
            cpu = found[1].strip() if found else cpu
        return cls(cpu=cpu, cores=os.cpu_count() or 1)

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} core{'s' if self.cores > 1 else ''}"


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # what glibc's mallopt calls them
_KEPT_BYTES, _LARGEST_KEPT = 1 << 30, 1 << 25  # glibc takes no larger block from what it keeps


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, for its next tensors; return whether it does. For a program of one's own.

    Else every activation comes from the system as fresh pages, a calibration's by the million, and each has to be
    cleared first: a fifth of a small network's step (benchmarks/memory.py). Only glibc has this (Linux).
    """
    mallopt = None if os.name != "posix" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT))


@contextmanager
def collecting_later() -> Iterator[None]:
    """Keep Python from looking for garbage: where much is made that stays, it would look again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def usable_cpus() -> list[int]:
    """Return the logical processors that this process may use: those that it is limited to, or all of them."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def most_threads() -> int:
    """Return how many threads are allowed, 4 for each core: runtimes crash or hang when they start very many."""
    return 4 * (os.cpu_count() or 1)


def check_threads(threads: object) -> int:
    """Return a number of threads that makes sense on this machine.

    >>> check_threads(1)
    1
    """
    if is_integer(threads) and 1 <= threads <= most_threads():
        return int(threads)
    allowed = f"an int from 1 to {most_threads()}, 4 for each core"
    raise InvalidArgumentError.about("threads", threads, allowed)


def timestamp() -> str:
    """Return the date and time, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
