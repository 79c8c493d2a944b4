"""How long each size of a network takes on a machine, measured; and the largest size that holds a time.

A profile lies beside the file of its network, as ``<file>.latency.json``. It has an entry for every way in which the
network was run: the runtime, the batch and the number of threads. numpy only: a device without torch uses this too.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from decomposable.errors import ArtifactError, DecomposableError, InvalidArgumentError
from decomposable.files import write_atomically
from decomposable.profiles import MOST, RUNTIMES, Entry, TimedSize, entry_from, timed_now
from decomposable.ranks import RankPlan, RankSelector
from decomposable.storage.fields import Damaged, Fields, require
from decomposable.timing import Machine

__all__ = ["RUNTIMES", "Entry", "LatencyProfile", "TimedSize", "choose_timed", "fingerprint", "timed_now"]

FORMAT = 1
MOST_BYTES = 1_000_000  # of a file that is read


@dataclass(frozen=True, kw_only=True)
class LatencyProfile:
    """The latencies of one network's sizes on one machine.

    Attributes:
        network: the `fingerprint` of the network that was measured.
        machine: where it was measured.
        entries: one for every runtime, batch and number of threads.

    Example:
        >>> sizes = [
        ...     TimedSize(macs=m, macs_fraction=m / 100, params=m, params_fraction=m / 100, median_ms=t, low_ms=t,
        ...               high_ms=t, repetitions=9)
        ...     for m, t in ((25, 2.0), (50, 4.0), (100, 5.0))
        ... ]
        >>> entry = Entry(runtime="torch", batch=1, threads=2, sizes=tuple(sizes))
        >>> profile = LatencyProfile(network="", machine=Machine.here(), entries=(entry,))
        >>> [profile.size_for(t, runtime="torch") for t in (2, 3, 4.5, 7)]
        [0.25, 0.375, 0.75, 1.0]
    """

    network: str
    machine: Machine
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, selector: RankSelector, entries: Sequence[Entry]) -> LatencyProfile:
        """What was measured on this machine."""
        return cls(network=fingerprint(selector), machine=Machine.here(), entries=tuple(entries))

    def size_for(
        self, milliseconds: float, *, runtime: str, batch: int | None = None, threads: int | None = None
    ) -> float:
        """The largest part of the original's MACs (or parameters) that takes at most so long on this machine.

        `batch` and `threads` need not be given where one entry of the runtime fits. The size is one for ranks rounded
        as the entry says: ``profile.entry(...).align``.
        """
        return self.entry(runtime=runtime, batch=batch, threads=threads).size_for(milliseconds)

    def alignment(self, *, runtime: str, batch: int | None = None, threads: int | None = None) -> int:
        """What ranks are best rounded to on this machine, where that was measured."""
        entry = self.entry(runtime=runtime, batch=batch, threads=threads)
        if not entry.trials:
            raise DecomposableError(
                f"align='measured': no alignments were tried ({entry}); {_MEASURE} --align measured"
            )
        return entry.align

    def entry(self, *, runtime: str, batch: int | None = None, threads: int | None = None) -> Entry:
        """The one entry of this runtime, batch and number of threads; what is None may be anything."""
        self._check_machine()
        if runtime not in RUNTIMES:
            raise InvalidArgumentError(f"runtime={runtime!r}; allowed: {', '.join(RUNTIMES)}")
        fits = [
            entry
            for entry in self.entries
            if entry.runtime == runtime and batch in (None, entry.batch) and threads in (None, entry.threads)
        ]
        if len(fits) == 1:
            return fits[0]
        there = "; ".join(map(str, fits or self.entries)) or "nothing"
        if not fits:
            wanted = {"batch": batch, "threads": threads}
            asked = ", ".join([runtime, *(f"{name} {value}" for name, value in wanted.items() if value is not None)])
            raise DecomposableError(f"latency: {asked} was not measured, but {there}; {_MEASURE}")
        raise InvalidArgumentError(
            f"latency: several entries fit: {there}; allowed: one of them, by batch= and threads= of size_for()"
        )

    def as_if_here(self) -> LatencyProfile:
        """The same figures, taken for this machine's: where two machines differ in name only."""
        return replace(self, machine=Machine.here())

    def _check_machine(self) -> None:
        here = Machine.here()
        if self.machine != here:
            raise DecomposableError(
                f"latency: it was measured on another machine ({self.machine}; this is {here}); {_MEASURE}, or "
                "use it all the same with profile.as_if_here()"
            )

    def check_network(self, selector: RankSelector) -> None:
        """Refuse to be used for another network than the one that was measured."""
        if self.network != fingerprint(selector):
            raise DecomposableError(f"latency: the profile is of another network; {_MEASURE}")

    def merged(self, older: LatencyProfile) -> LatencyProfile:
        """With the entries of an older profile that were measured in other ways, on this network and machine."""
        if (older.network, older.machine) != (self.network, self.machine):
            return self
        mine = {entry.setting for entry in self.entries}
        others = [entry for entry in older.entries if entry.setting not in mine]
        return replace(self, entries=tuple(sorted([*others, *self.entries], key=lambda entry: entry.setting)))

    @staticmethod
    def path_beside(path: str | os.PathLike[str]) -> Path:
        """Where the profile of a network's file lies.

        >>> LatencyProfile.path_beside("net.safetensors").name
        'net.safetensors.latency.json'
        """
        file = Path(path)
        return file.with_name(f"{file.name}.latency.json")

    @classmethod
    def load_beside(cls, path: str | os.PathLike[str]) -> LatencyProfile | None:
        """The profile that lies beside a network's file, if one does."""
        beside = cls.path_beside(path)
        return cls.load(beside) if beside.exists() else None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencyProfile:
        """Read a file of `save`; what is wrong in it is an `ArtifactError`."""
        try:
            require(stat.S_ISREG(os.stat(path).st_mode), "not an ordinary file")  # a pipe would be waited for
            with Path(path).open("rb") as file:
                content = file.read(MOST_BYTES + 1)
            require(len(content) <= MOST_BYTES, f"it has more than {MOST_BYTES:,} bytes")
            return _parse(content)
        except (Damaged, RecursionError) as error:
            raise ArtifactError(f"{path}: not a latency profile ({error}); {_MEASURE}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile, at once or not at all; entries of other settings that the file has are kept."""
        file, profile = Path(path), self
        with suppress(ArtifactError, FileNotFoundError):  # there is nothing to keep
            profile = self.merged(self.load(file))
        content = {"format": FORMAT, "network": profile.network, "machine": asdict(profile.machine)}
        entries = [asdict(entry) for entry in profile.entries]
        write_atomically(file, (json.dumps({**content, "entries": entries}, indent=1) + "\n").encode())


_MEASURE = "measure here with: decomposable bench FILE (without torch: decomposable-edge bench FILE)"


def choose_timed(
    selector: RankSelector,
    profile: Callable[[], LatencyProfile | None],
    *,
    runtime: str,
    threads: int,
    latency_ms: float | None,
    align: int | str | None,
    batch: int | None = None,
    **size: Any,
) -> RankPlan:
    """The plan for a size as ``selector.choose`` takes it, or for a time; `align` may be "measured".

    `profile` is called where it is needed. Of several entries of the runtime, the one of so many threads counts, and of
    several batches the smallest, unless `batch` names one.
    """
    if latency_ms is None and align != "measured":
        return selector.choose(**size, align=align)  # type: ignore[arg-type]
    given = [name for name, value in size.items() if value is not None]
    if latency_ms is not None and given:
        raise InvalidArgumentError(
            f"a size is given by exactly one of macs, params, ratio, ranks or latency_ms; got {', '.join(given)} and "
            "latency_ms"
        )
    asked = f"align={align!r}" if latency_ms is None else f"latency_ms={latency_ms!r}"
    known = profile()
    if known is None:
        raise InvalidArgumentError(f"{asked}: there is no latency profile of this network; {_MEASURE}")
    known.check_network(selector)
    entry = _entry_for(known, runtime, batch, threads)
    if align == "measured":
        multiple = known.alignment(runtime=runtime, batch=entry.batch, threads=entry.threads)
        if latency_ms is None:
            return selector.choose(**size, align=multiple)
    assert latency_ms is not None
    if align not in (None, "measured", entry.align):
        raise InvalidArgumentError(
            f"{asked} with align={align!r}: what was measured has align={entry.align} ({entry}); allowed: that one"
        )
    return selector.of_size(entry.size_for(latency_ms), align=entry.align)


def _entry_for(profile: LatencyProfile, runtime: str, batch: int | None, threads: int) -> Entry:
    of_runtime = [entry for entry in profile.entries if entry.runtime == runtime and batch in (None, entry.batch)]
    of_threads = [entry for entry in of_runtime if entry.threads == threads]
    batches = [entry.batch for entry in of_threads or of_runtime]
    smallest = min(batches) if batch is None and batches else batch
    return profile.entry(runtime=runtime, batch=smallest, threads=threads if of_threads else None)


def fingerprint(selector: RankSelector) -> str:
    """What tells one network's sizes from another's: what its layers cost, and the order of all its bases."""
    fixed = (selector.fixed_macs, selector.fixed_params)
    described = json.dumps([fixed, [asdict(cost) for cost in selector.costs]])
    return hashlib.sha256(described.encode() + selector.order.astype("<i8").tobytes()).hexdigest()


def _parse(content: bytes) -> LatencyProfile:
    def refuse(constant: str) -> None:
        raise Damaged(f"{constant} is not a number")

    try:
        value = json.loads(content, parse_constant=refuse)
    except Damaged:
        raise
    except ValueError as error:
        raise Damaged("it is not JSON") from error
    fields = Fields(value, "it")
    version = fields.integer("format", least=1, most=MOST)
    require(version == FORMAT, f"its format is version {version}, this package reads {FORMAT}")
    machine = Fields(fields.mapping("machine"), "machine")
    entries = tuple(entry_from(entry) for entry in fields.record_list("entries"))
    require(len({entry.setting for entry in entries}) == len(entries), "two entries are of the same setting")
    return LatencyProfile(
        network=fields.text("network"),
        machine=Machine(cpu=machine.text("cpu"), cores=machine.integer("cores", 1, MOST)),
        entries=entries,
    )
