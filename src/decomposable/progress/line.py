"""A line about work that is under way, and whom it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Progress(str):
    """A line about work that is under way: its text, and what a program would want to know of it.

    >>> line = Progress("training", "epoch 3/10", fraction=0.25, seconds_left=90)
    >>> line, line.task, line.fraction, line.seconds_left
    ('training: epoch 3/10, 90 s left', 'training', 0.25, 90)
    """

    task: str  # empty while things are made ready
    detail: str
    fraction: float | None  # of the work that is done, 0 to 1; None where nobody knows
    seconds_left: float | None

    def __new__(
        cls, task: str, detail: str = "", *, fraction: float | None = None, seconds_left: float | None = None
    ) -> Progress:
        """Put the line together."""
        left = "" if seconds_left is None else f"{as_duration(seconds_left)} left"
        line = super().__new__(cls, _joined(": ", task, _joined(", ", detail, left)))
        line.task, line.detail, line.fraction, line.seconds_left = task, detail, fraction, seconds_left
        return line

    def __getnewargs_ex__(self) -> tuple[Any, ...]:  # it goes from process to process
        return (self.task, self.detail), {"fraction": self.fraction, "seconds_left": self.seconds_left}

    @classmethod
    def of(cls, text: str) -> Progress:
        """Return a line that somebody wrote by hand, "task: detail", as one of these."""
        if isinstance(text, Progress):
            return text
        task, _, detail = text.partition(": ")
        return cls(task, detail)

    def but(self, **changes: Any) -> Progress:
        """Return the same with something else in the place of what it says."""
        return Progress(**vars(self) | changes)

    def within(self, task: str) -> Progress:
        """Return the same, as a part of something larger."""
        return self.but(task=task, detail=_joined(": ", self.task, self.detail))


def _joined(separator: str, *texts: str) -> str:
    return separator.join(filter(None, texts))


Report = Callable[[Progress], None]


def quiet(progress: str) -> None:
    """Show nothing."""


def within(task: str, report: Report) -> Report:
    """Return a report for a part of something larger."""
    return lambda progress: report(Progress.of(progress).within(task))


def as_duration(seconds: float) -> str:
    """Return seconds as people say them.

    >>> as_duration(42.2), as_duration(3600 * 27 + 120), as_duration(86400 * 20.3)
    ('42 s', '27 h 2 min', '20 days')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 100 else f"{hours / 24:.0f} days"
