"""What a latency profile consists of: sizes with their times, under one setting each; and what its file says.

The file is JSON, with one entry for every runtime, batch and number of threads on every machine::

    {"format": 1, "network": "<its fingerprint>", "machines": [{"cpu": "...", "cores": 2, "entries": [
        {"runtime": "torch", "batch": 1, "threads": 2, "align": "auto", "trials": [[1, 1.0], ...], "measured": "<when>",
         "sizes": [{"macs": 10, "macs_fraction": 0.1, "params": 10, "params_fraction": 0.1,
                    "median_ms": 2.0, "low_ms": 1.9, "high_ms": 2.2, "repetitions": 99}, ...]}, ...]}, ...]}

Sizes stand in order, the smallest first; `macs` and `macs_fraction` are null where MACs are not known.
"""

from __future__ import annotations

import json
import os
import stat
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decomposable_edge.checks import is_number
from decomposable_edge.errors import BudgetError, InvalidArgumentError
from decomposable_edge.fields import Damaged, Fields, parse_json, require
from decomposable_edge.machine import Machine, timestamp
from decomposable_edge.sizing.plans import RankPlan
from decomposable_edge.sizing.rounding import Align, described

FORMAT = 1
RUNTIMES = ("torch", "onnxruntime")
MOST = 1 << 53  # of a number in a file: readers of JSON keep whole numbers up to here
MOST_BYTES = 1_000_000  # of a file that is read


class Newer(Damaged):
    """The file is of a later version of this package: it cannot be read, and is not broken."""


@dataclass(frozen=True)
class Sample:
    """How long every call of one function took, in seconds."""

    seconds: tuple[float, ...]

    @property
    def repetitions(self) -> int:
        """Return how often it was called."""
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


@dataclass(frozen=True, kw_only=True)
class TimedSize:
    """A size as it was measured: what it costs, and the median and the quartiles of its times."""

    macs: int | None
    macs_fraction: float | None
    params: int
    params_fraction: float
    median_ms: float
    low_ms: float
    high_ms: float
    repetitions: int

    @classmethod
    def of(cls, plan: RankPlan, sample: Sample) -> TimedSize:
        """Return a plan with the times of its network."""
        low, median, high = sample.quartiles_ms
        costs = {name: getattr(plan, name) for name in ("macs", "macs_fraction", "params", "params_fraction")}
        return cls(**costs, median_ms=median, low_ms=low, high_ms=high, repetitions=sample.repetitions)

    @property
    def size(self) -> float:
        """Return its part of the original's MACs, or of its parameters if MACs are not known."""
        return self.params_fraction if self.macs_fraction is None else self.macs_fraction


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What was measured with one runtime, batch and number of threads.

    Attributes:
        sizes: smallest first; the last one is the original network where that was measured.
        align: what the ranks of these sizes were rounded to.
        trials: alignments and their times relative to no rounding, where several were tried.
        measured: when.
    """

    runtime: str
    batch: int
    threads: int
    sizes: tuple[TimedSize, ...]
    align: Align = 1
    trials: tuple[tuple[Align, float], ...] = ()
    measured: str = ""

    @property
    def setting(self) -> tuple[str, int, int]:
        """Return what tells entries apart: the runtime, the batch, the threads."""
        return self.runtime, self.batch, self.threads

    def size_for(self, milliseconds: float) -> float:
        """Return the largest part of the original that takes at most so long, to be given to ``resize_(macs=...)``.

        It is the largest measured size whose median is within the time and, from there, as far towards the next larger
        one as a straight line between the two says. No line leads to the original: that one is dense, and just below
        it two factors are often slower.
        """
        if not is_number(milliseconds) or not 0 < milliseconds < float("inf"):
            raise InvalidArgumentError.about("latency_ms", milliseconds, "milliseconds above 0")
        held = [i for i, timed in enumerate(self.sizes) if timed.median_ms <= milliseconds]
        if not held:
            fastest = min(self.sizes, key=lambda timed: timed.median_ms)
            allowed = f"{fastest.median_ms:.3f} ms, at {fastest.size:.4f} of the original ({self})"
            text = f"latency_ms={milliseconds!r} is too small: the smallest that was measured is {allowed}"
            raise BudgetError.about("latency_ms", milliseconds, allowed, text)
        below, above = (self.sizes[min(held[-1] + step, len(self.sizes) - 1)] for step in (0, 1))
        if above.size >= 1 or above is below:
            return below.size
        place = (milliseconds - below.median_ms) / (above.median_ms - below.median_ms)
        return below.size + place * (above.size - below.size)

    @property
    def rounding(self) -> str:
        """Return what ranks were rounded to, in words; of several alignments that were tried, with their times."""
        tried = ", ".join(f"{align}: {time:.3f}" for align, time in self.trials)
        return f"{described(self.align)} (relative times by alignment: {tried})" if tried else described(self.align)

    def __str__(self) -> str:
        return f"{self.runtime}, batch {self.batch}, {self.threads} thread{'s' if self.threads > 1 else ''}"


def timed_now(*, sizes: Sequence[TimedSize], trials: Sequence[tuple[Align, float]] = (), **setting: Any) -> Entry:
    """Return the entry of a measurement that has just ended; of sizes that are the same one, the first is kept."""
    by_size = {timed.size: timed for timed in reversed(sizes)}
    ordered = tuple(by_size[size] for size in sorted(by_size))
    return Entry(**setting, sizes=ordered, trials=tuple(trials), measured=timestamp())


@dataclass(frozen=True)
class Stored:
    """What a file holds: the entries of one network, by machine."""

    network: str
    machines: Mapping[Machine, tuple[Entry, ...]]

    @property
    def nearest(self) -> Machine:
        """This machine, where it has entries; else the one that was measured last."""
        here = Machine.here()
        if here in self.machines:
            return here
        return max(self.machines, key=lambda machine: max((e.measured for e in self.machines[machine]), default=""))

    def with_newer(self, network: str, machine: Machine, entries: tuple[Entry, ...]) -> Stored:
        """Return it with newer entries; what is of another network goes, and so does the older one of a setting."""
        if network != self.network:
            return Stored(network, {machine: entries})
        by_setting = {entry.setting: entry for entry in (*self.machines.get(machine, ()), *entries)}
        return Stored(network, {**self.machines, machine: tuple(by_setting[each] for each in sorted(by_setting))})

    def to_json(self) -> bytes:
        """Return the content of a file."""
        machines = [{**asdict(m), "entries": [asdict(e) for e in entries]} for m, entries in self.machines.items()]
        content = {"format": FORMAT, "network": self.network, "machines": machines}
        return (json.dumps(content, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, content: bytes) -> Stored:
        """Return what a file says, every claim checked; what is wrong is `Damaged`."""
        require(len(content) <= MOST_BYTES, f"it has more than {MOST_BYTES:,} bytes")
        fields = Fields(parse_json(content.decode(errors="replace"), "it"), "it")
        version = fields.integer("format", least=1, most=MOST)
        if version != FORMAT:
            raise Newer(f"its format is version {version}, this package reads {FORMAT}")
        records = fields.record_list("machines")
        machines = {Machine(cpu=each.text("cpu"), cores=_count(each, "cores")): _entries(each) for each in records}
        require(len(machines) > 0, "'machines' of it is empty")
        require(len(machines) == len(records), "a machine is there twice")
        return cls(fields.text("network"), machines)

    @classmethod
    def read(cls, path: Path) -> Stored:
        """Return what the file at a path says."""
        require(stat.S_ISREG(os.stat(path).st_mode), "not an ordinary file")  # a pipe would be waited for
        with path.open("rb") as file:
            return cls.from_json(file.read(MOST_BYTES + 1))


def _entries(machine: Fields) -> tuple[Entry, ...]:
    entries = tuple(_entry(record) for record in machine.record_list("entries"))
    require(len({entry.setting for entry in entries}) == len(entries), "two entries are of the same setting")
    return entries


def _entry(fields: Fields) -> Entry:
    where = fields.where
    runtime, align, trials = fields.text("runtime"), fields.get("align"), fields.get("trials")
    require(runtime in RUNTIMES, f"'runtime' of {where} is {runtime!r:.40}, not one of {', '.join(RUNTIMES)}")
    require(_is_align(align), f"'align' of {where} is {align!r:.60}, not a number from 1 or 'auto'")
    is_pairs = isinstance(trials, list) and all(
        isinstance(t, list) and len(t) == 2 and _is_align(t[0]) and _is_positive(t[1]) for t in trials
    )
    require(is_pairs, f"'trials' of {where} is {trials!r:.60}, not a list of alignments and times")
    sizes = tuple(_timed(size) for size in fields.record_list("sizes"))
    require(len(sizes) > 0, f"'sizes' of {where} is empty")
    require(len({size.macs is None for size in sizes}) == 1, f"'sizes' of {where}: some have MACs, some have not")
    places = [size.size for size in sizes]
    require(places == sorted(set(places)) and places[-1] <= 1, f"'sizes' of {where} are not in order")
    return Entry(
        runtime=runtime,
        batch=_count(fields, "batch"),
        threads=_count(fields, "threads"),
        sizes=sizes,
        align=align,
        trials=tuple((align, float(time)) for align, time in trials),
        measured=fields.text("measured"),
    )


def _timed(fields: Fields) -> TimedSize:
    has_macs = fields.get("macs") is not None
    require(has_macs == (fields.get("macs_fraction") is not None), f"MACs of {fields.where} are only half there")
    timed = TimedSize(
        macs=_count(fields, "macs") if has_macs else None,
        macs_fraction=_number(fields, "macs_fraction") if has_macs else None,
        params=_count(fields, "params"),
        params_fraction=_number(fields, "params_fraction"),
        median_ms=_number(fields, "median_ms"),
        low_ms=_number(fields, "low_ms"),
        high_ms=_number(fields, "high_ms"),
        repetitions=_count(fields, "repetitions"),
    )
    require(timed.low_ms <= timed.median_ms <= timed.high_ms, f"times of {fields.where} are not in order")
    return timed


def _count(fields: Fields, key: str) -> int:
    return fields.integer(key, least=1, most=MOST)


def _number(fields: Fields, key: str) -> float:
    value = fields.get(key)
    require(_is_positive(value), f"'{key}' of {fields.where} is {value!r:.60}, not a number above 0")
    return float(value)


def _is_align(value: object) -> bool:
    return value == "auto" or (type(value) is int and 1 <= value <= MOST)


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < MOST  # type: ignore[operator]
