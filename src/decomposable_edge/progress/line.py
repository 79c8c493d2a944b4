"""A line about work that is under way, and whom it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decomposable_edge.progress.pace import as_duration


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
        rest = _rest(detail, seconds_left)
        line = super().__new__(cls, ": ".join(filter(None, (task, rest))))
        line.task, line.detail, line.fraction, line.seconds_left = task, detail, fraction, seconds_left
        return line

    @property
    def rest(self) -> str:
        """All but the task."""
        return _rest(self.detail, self.seconds_left)

    def __getnewargs_ex__(self) -> tuple[Any, ...]:  # it goes from process to process
        return (self.task, self.detail), {"fraction": self.fraction, "seconds_left": self.seconds_left}

    @classmethod
    def of(cls, text: str) -> Progress:
        """A line that somebody wrote by hand, "task: detail"."""
        if isinstance(text, Progress):
            return text
        task, _, detail = text.partition(": ")
        return cls(task, detail)

    def but(self, **changes: Any) -> Progress:
        """The same with something else in the place of what it says."""
        now: dict[str, Any] = {
            "task": self.task,
            "detail": self.detail,
            "fraction": self.fraction,
            "seconds_left": self.seconds_left,
        }
        return Progress(**now | changes)

    def within(self, task: str) -> Progress:
        """The same, as a part of something larger."""
        return self.but(task=task, detail=": ".join(filter(None, (self.task, self.detail))))

    def cut(self, width: int) -> str:
        """No more than so many letters; the time left is the last thing to go.

        >>> Progress("training", "epoch 3/10, loss 0.123", seconds_left=90).cut(32)
        'training: epoch 3/10 … 90 s left'
        """
        tail = "" if self.seconds_left is None else f" … {as_duration(self.seconds_left)} left"
        return self if len(self) <= width else f"{self[: max(0, width - len(tail))]}{tail}"[:width]


def _rest(detail: str, seconds_left: float | None) -> str:
    left = "" if seconds_left is None else f"{as_duration(seconds_left)} left"
    return ", ".join(filter(None, (detail, left)))


Report = Callable[[Progress], None]


def quiet(progress: str) -> None:
    """A report that shows nothing."""


def within(task: str, report: Report) -> Report:
    """A report for a part of something larger."""
    return lambda progress: report(Progress.of(progress).within(task))
