"""What is shown of all trainings of a comparison together: those done, those under way, and about the time left."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from decomposable.progress import Progress, Report, as_duration, quiet
from decomposable.training.loop import Say
from decomposable_lab.comparison.parts import TrainingJob

Failures = dict[str, str]  # why, by the name of the part


@dataclass(frozen=True, kw_only=True)
class Watchers:
    """Hold the functions that a comparison tells: a line that is written over, lines that stay, and details."""

    progress: Report = quiet
    say: Say = quiet
    detail: Say = quiet


@dataclass
class _UnderWay:
    """A training that was begun: since when, what it said last, and how long it takes in all, as far as it knows."""

    since: float
    line: str = "starting"
    seconds: float | None = None
    trained: float | None = None  # when it last said that it was training


class Watch:
    """Follow the trainings of a comparison, and tell the watchers.

    The time left is what the trainings under way say of themselves, and for those to come what others of their method
    took, or else what any took; `jobs` of them side by side.
    """

    def __init__(self, parts: Sequence[TrainingJob], jobs: int, watchers: Watchers) -> None:
        self.total, self.done = len(parts), 0
        self._parts, self._jobs, self._watchers = {part.path: part for part in parts}, jobs, watchers
        self._under_way: dict[Any, _UnderWay] = {}
        self._took: dict[Any, float] = {}
        self.failures: Failures = {}
        self._after_training: list[float] = []  # seconds for the sizes, of each that is done
        self._start = time.monotonic()
        self.show()

    def begin(self, part: TrainingJob) -> None:
        """Note that it has begun."""
        self._under_way[part.path] = _UnderWay(time.monotonic())
        self.show()

    def hear(self, part: TrainingJob, line: Progress) -> None:
        """Note how far it is."""
        one, now = self._under_way[part.path], time.monotonic()
        is_training = line.task == "training"
        one.line = line.detail if is_training else ": ".join(filter(None, (line.task, line.detail)))
        if is_training:
            one.trained = now
        if line.seconds_left is not None:
            sizes = fmean(self._after_training) if is_training and self._after_training else 0.0
            one.seconds = now - one.since + line.seconds_left + sizes

    def tell(self, part: TrainingJob, text: str) -> None:
        """Pass on a line that stays."""
        self._watchers.detail(f"{part.name}: {text}")

    def end(self, part: TrainingJob, record: Mapping[str, Any]) -> None:
        """Note that it is done."""
        one, now = self._under_way.pop(part.path), time.monotonic()
        self._took[part.path] = now - one.since
        if one.trained is not None:
            self._after_training.append(now - one.trained)
        self.done += 1
        self._watchers.say(_line(part, record, self.done, self.total))

    def stop(self, part: TrainingJob) -> None:
        """Note that it was stopped and can be continued."""
        self._under_way.pop(part.path, None)

    def fail(self, part: TrainingJob, reason: str) -> None:
        """Note that it has failed."""
        self._under_way.pop(part.path, None)
        del self._parts[part.path]
        self.failures[part.name] = reason
        self._watchers.say(f"{part.name} failed: {reason}")

    def show(self) -> None:
        """Tell how far all of them are."""
        lines = [f"{self._parts[path].name} {one.line}" for path, one in self._under_way.items()]
        left, spent = self.seconds_left(), time.monotonic() - self._start
        fraction = None if left is None else spent / max(1e-9, spent + left)
        detail = "  |  ".join([f"{self.done} of {self.total} done", *lines])
        self._watchers.progress(Progress("comparing", detail, fraction=fraction, seconds_left=left))

    def seconds_left(self) -> float | None:
        """Estimate how long all of them still take; None as long as it is unknown."""
        now = time.monotonic()
        known = {path: one.seconds for path, one in self._under_way.items() if one.seconds is not None} | self._took
        if not known:
            return None
        to_come = [path for path in self._parts if path not in self._took]
        since = {path: one.since for path, one in self._under_way.items()}
        all_left = [max(0.0, self._expected(path, known) - (now - since.get(path, now))) for path in to_come]
        seconds = max(sum(all_left) / self._jobs, max(all_left, default=0.0))
        return seconds if seconds > 0 or not to_come else None  # what takes longer than was thought: nobody knows

    def _expected(self, path: Any, known: Mapping[Any, float]) -> float:
        if path in known:
            return known[path]
        alike = [s for p, s in known.items() if p in self._parts and self._parts[p].method == self._parts[path].method]
        return fmean(alike or known.values())


def _line(part: TrainingJob, record: Mapping[str, Any], number: int, count: int) -> str:
    """Return what came out of one training: the best accuracy, and what it took."""
    rows = record["sizes"]
    best = max((row["accuracy"] for row in rows), default=float("nan"))
    sizes = f"{len(rows)} sizes" if len(rows) > 1 else f"{rows[0]['macs_fraction']:.3f} of the MACs" if rows else ""
    seconds = as_duration(record["training_seconds"])
    return f"[{number}/{count}] {part.name}: {sizes}, up to {best:.2f}% ({seconds} of training)"
