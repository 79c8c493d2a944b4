"""How long each size of a network takes on a machine, measured; and the largest size that holds a time.

A profile lies beside the file of its network, as ``<file>.latency.json``, which `profiles` describes. It has an entry
for every way in which the network was run: the runtime, the batch and the number of threads. numpy only, for devices.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from decomposable_edge.errors import ArtifactError, DecomposableError, InvalidArgumentError
from decomposable_edge.fields import Damaged
from decomposable_edge.files import write_atomically
from decomposable_edge.locks import holding
from decomposable_edge.machine import Machine
from decomposable_edge.sizing.interpolation import CalibratedSizes, choose_calibrated
from decomposable_edge.sizing.plans import RankPlan, SizeRequest
from decomposable_edge.sizing.profiles import RUNTIMES, Entry, Newer, Stored, TimedSize, timed_now
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.rounding import Align
from decomposable_edge.text import one_line

__all__ = ["RUNTIMES", "Entry", "LatencyProfile", "TimedSize", "choose_timed", "fingerprint", "timed_now"]

ENDING = ".latency.json"  # such a file is a profile: where it is damaged, the next measurement takes its place


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
        [0.25, 0.375, 0.5, 1.0]
    """

    network: str
    machine: Machine
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, selector: RankSelector, entries: Sequence[Entry]) -> LatencyProfile:
        """Return what was measured on this machine."""
        return cls(network=fingerprint(selector), machine=Machine.here(), entries=tuple(entries))

    def size_for(
        self, milliseconds: float, *, runtime: str, batch: int | None = None, threads: int | None = None
    ) -> float:
        """Return the largest part of the original's MACs (or parameters) that takes at most so long on this machine.

        It is a size for ranks rounded as the entry says: ``profile.entry(...).align``.
        """
        return self.entry(runtime=runtime, batch=batch, threads=threads).size_for(milliseconds)

    def alignment(self, *, runtime: str, batch: int | None = None, threads: int | None = None) -> Align:
        """Return what ranks are best rounded to on this machine, where that was measured."""
        entry = self.entry(runtime=runtime, batch=batch, threads=threads)
        if not entry.trials:
            text = f"align='measured': no alignments were tried ({entry}); {_MEASURE} --align measured"
            raise DecomposableError.about("align", "measured", f"{_MEASURE} --align measured", text)
        return entry.align

    def entry(self, *, runtime: str, batch: int | None = None, threads: int | None = None) -> Entry:
        """Return the one entry of this runtime, batch and number of threads; what is None may be anything."""
        here = Machine.here()
        if self.machine != here:
            allowed = f"{_MEASURE}, or use it all the same with profile.as_if_here()"
            there = one_line(self.machine, 150)
            text = f"latency: it was measured on another machine ({there}; this is {here}); {allowed}"
            raise DecomposableError.about("latency", self.machine, allowed, text)
        if runtime not in RUNTIMES:
            raise InvalidArgumentError.about("runtime", runtime, ", ".join(RUNTIMES))
        fits = [e for e in self.entries if e.runtime == runtime and batch in (None, e.batch)]
        fits = [e for e in fits if threads in (None, e.threads)]
        if len(fits) == 1:
            return fits[0]
        there = "; ".join(map(str, fits or self.entries)) or "nothing"
        if not fits:
            wanted = {"batch": batch, "threads": threads}
            asked = ", ".join([runtime, *(f"{name} {value}" for name, value in wanted.items() if value is not None)])
            how = "" if threads is None else f", with --threads {threads}, or use as many threads as were measured"
            text = f"latency: {asked} was not measured, but {there}; {_MEASURE}{how}"
            raise DecomposableError.about("latency", asked, f"{_MEASURE}{how}", text)
        allowed = "one of them, by batch= and threads= of size_for()"
        raise InvalidArgumentError.about("latency", fits, allowed, why=f"several entries fit: {there}")

    def as_if_here(self) -> LatencyProfile:
        """Return the same figures, taken for this machine's: where two machines differ in name only."""
        return replace(self, machine=Machine.here())

    def check_network(self, selector: RankSelector) -> None:
        """Refuse to be used for another network than the one that was measured."""
        if self.network != fingerprint(selector):
            text = f"latency: the profile is of another network; {_MEASURE}"
            raise DecomposableError.about("latency", "another network", _MEASURE, text)

    @staticmethod
    def path_beside(path: str | os.PathLike[str]) -> Path:
        """Return where the profile of a network's file lies."""
        file = Path(path)
        return file.with_name(f"{file.name}{ENDING}")

    @classmethod
    def load_beside(cls, path: str | os.PathLike[str]) -> LatencyProfile | None:
        """Return the profile that lies beside a network's file, if one does."""
        beside = cls.path_beside(path)
        return cls.load(beside) if beside.exists() else None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencyProfile:
        """Return what a file of `save` has of this machine, or else of the one that was measured last."""
        try:
            stored = Stored.read(Path(path))
        except Damaged as error:
            how = f"{_MEASURE}, which replaces it" if _may_replace(Path(path), error) else f"remove it, and {_MEASURE}"
            raise ArtifactError.of(path, f"not a latency profile ({error}); {how}") from error
        machine = stored.nearest
        return cls(network=stored.network, machine=machine, entries=stored.machines[machine])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile, at once or not at all; what the file has of other settings and machines is kept.

        A profile that is damaged is replaced, with a warning. Any other file that is there never is.
        """
        file = Path(path)
        self.check_place(file)
        # What another process writes between reading and writing would be lost.
        with holding(file.with_name(f".{file.name}.lock")):
            found, damage = _found(file)
            older = found or Stored(self.network, {})
            content = older.with_newer(self.network, self.machine, self.entries).to_json()
            try:
                Stored.from_json(content)
            except Damaged as error:
                why, allowed = f"the profile could not be read again ({error})", "numbers that can be read again"
                raise InvalidArgumentError.about(str(file), str(error), allowed, why=why) from error
            write_atomically(file, content)
        if damage is not None:
            warnings.warn(f"{file}: it was damaged ({damage}); it now holds the new measurement alone", stacklevel=2)

    @staticmethod
    def check_place(path: str | os.PathLike[str]) -> None:
        """Refuse a path where `save` would fail or destroy something else; to be asked before a long measurement."""
        file = Path(path)
        if file.is_dir():
            raise InvalidArgumentError.about(str(file), "a folder", "the name of a file", why="it is a folder")
        if not file.parent.is_dir():
            why = f"there is no folder {file.parent}"
            raise InvalidArgumentError.about(str(file), str(file.parent), "one that exists", why=why)
        _found(file)


def _found(file: Path) -> tuple[Stored | None, Damaged | None]:
    """Return what a file holds that a profile is to be written to, or its damage; refuse one not to be replaced."""
    try:
        return Stored.read(file), None
    except FileNotFoundError:
        return None, None
    except Damaged as error:
        if _may_replace(file, error):
            return None, error
        why = f"it is there and is not a latency profile ({error}), so it is not replaced"
        allowed = f"a profile, or a new file (a damaged one is replaced if its name ends in {ENDING})"
        raise InvalidArgumentError.about(str(file), str(error), allowed, why=why) from error


def _may_replace(file: Path, error: Damaged) -> bool:
    """Return whether a file that cannot be read was a profile, by its name; one of a later version is not damaged."""
    return file.name.endswith(ENDING) and file.is_file() and not isinstance(error, Newer)


_MEASURE = "measure here with: decomposable bench FILE (without torch: decomposable-edge bench FILE)"


def choose_timed(
    selector: RankSelector,
    profile: Callable[[], LatencyProfile | None],
    request: SizeRequest,
    *,
    calibrated: CalibratedSizes | None = None,
    runtime: str,
    threads: int,
) -> RankPlan:
    """Return the plan for a request, which may be one for a time, and whose `align` may be "measured".

    Where it is too far from all sizes that were `calibrated`, the nearest of those below may take its place. Ranks for
    a time are rounded as they were when it was measured; only "auto" agrees to that. `profile` is called where it is
    needed. Only entries of the runtime with so many threads count, and of several batches the smallest, unless the
    request names one.
    """
    latency_ms, align = request.latency_ms, request.align
    if latency_ms is None and align != "measured":
        return choose_calibrated(selector, calibrated, request)
    request.way()  # before a file is read
    option, came = ("align", align) if latency_ms is None else ("latency_ms", latency_ms)
    known = profile()
    if known is None:
        text = f"{option}={came!r}: there is no latency profile of this network; {_MEASURE}"
        raise InvalidArgumentError.about(option, came, _MEASURE, text)
    known.check_network(selector)
    batches = [entry.batch for entry in known.entries if (entry.runtime, entry.threads) == (runtime, threads)]
    batch = min(batches) if request.batch is None and batches else request.batch
    entry = known.entry(runtime=runtime, batch=batch, threads=threads)
    if align == "measured":
        best = known.alignment(runtime=runtime, batch=entry.batch, threads=entry.threads)
        if latency_ms is None:
            return choose_calibrated(selector, calibrated, replace(request, align=best))
    assert latency_ms is not None
    if align not in (None, "auto", "measured") and selector.effective_align(align) != entry.align:
        why = f"{align!r}, but the times were measured with align={entry.align} ({entry})"
        raise InvalidArgumentError.about("align", align, f"{entry.align}", why=why)
    size = {selector.measure: entry.size_for(latency_ms)}
    return choose_calibrated(selector, calibrated, SizeRequest(**size, align=entry.align))  # type: ignore[arg-type]


def fingerprint(selector: RankSelector) -> str:
    """Return what tells one network's sizes from another's: what its layers cost, and the order of all its bases."""
    fixed = (selector.fixed_macs, selector.fixed_params)
    described = json.dumps([fixed, [asdict(cost) for cost in selector.costs]])
    return hashlib.sha256(described.encode() + selector.order.astype("<i8").tobytes()).hexdigest()
