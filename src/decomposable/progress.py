"""How far a long piece of work is, said in one way by everything that takes long.

    tracker = Tracker(report, "calibrating", total=60, unit="passes")     the one who works counts …
    tracker.update(12, "17 sizes")
        └─▶ report(Progress) ─▶ "calibrating: 12 of 60 passes, 17 sizes, 3 min left"     … the one who watches shows

A `Progress` is text, so `print` and `list.append` are reports too; who draws a bar takes its `fraction`. The command
line shows it by a `ProgressLine`, and so does a function that was given no report, but on a terminal only.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from decomposable.text import printable

SECONDS_BEFORE_SHOWN = 2.0  # what is over sooner needs no line, unless it was asked for
SECONDS_BETWEEN_LINES, VERBOSE_SECONDS = 60.0, 5.0  # where lines cannot be written over


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
        rest = ", ".join(filter(None, (detail, left)))
        line = super().__new__(cls, ": ".join(filter(None, (task, rest))))
        line.task, line.detail, line.fraction, line.seconds_left = task, detail, fraction, seconds_left
        return line

    def __getnewargs_ex__(self) -> tuple[Any, ...]:  # it goes from process to process
        return (self.task, self.detail), {"fraction": self.fraction, "seconds_left": self.seconds_left}

    @classmethod
    def of(cls, text: str) -> Progress:
        """A line that somebody wrote by hand, "task: detail"."""
        if isinstance(text, Progress):
            return text
        task, _, detail = text.partition(": ")
        return cls(task, detail)

    def within(self, task: str) -> Progress:
        """The same, as a part of something larger."""
        detail = ": ".join(filter(None, (self.task, self.detail)))
        return Progress(task, detail, fraction=self.fraction, seconds_left=self.seconds_left)

    def cut(self, width: int) -> str:
        """No more than so many letters; the time left is the last thing to go.

        >>> Progress("training", "epoch 3/10, loss 0.123", seconds_left=90).cut(32)
        'training: epoch 3/10 … 90 s left'
        """
        tail = "" if self.seconds_left is None else f" … {as_duration(self.seconds_left)} left"
        return self if len(self) <= width else f"{self[: max(0, width - len(tail))]}{tail}"[:width]


Report = Callable[[Progress], None]


def quiet(progress: str) -> None:
    """A report that shows nothing."""


def within(task: str, report: Report) -> Report:
    """A report for a part of something larger."""
    return lambda progress: report(Progress.of(progress).within(task))


class Tracker:
    """Counts one piece of work, and tells how far it is; the time left follows from the pace so far.

    >>> tracker = Tracker(print, "measuring", total=4, unit="sizes")
    >>> tracker.update(0, "0.5")
    measuring: 0 of 4 sizes, 0.5
    """

    def __init__(self, report: Report, task: str, *, total: float, unit: str = "") -> None:
        self.report, self.task, self.total, self.unit = report, task, total, unit
        self._start = time.monotonic()

    def update(self, done: float, detail: str = "") -> None:
        """So much of the total is done; `detail` is what else there is to say."""
        fraction = min(1.0, done / self.total) if self.total > 0 else 1.0
        count = f"{done:.4g} of {self.total:.4g} {self.unit}".rstrip()
        left = time_left(time.monotonic() - self._start, fraction)
        self.report(Progress(self.task, ", ".join(filter(None, (count, detail))), fraction=fraction, seconds_left=left))


class InTurn:
    """A report for several pieces of work, one after the other, that take about as long as each other.

    The time left is that of all of them.

    >>> report = InTurn(print, count=3)
    >>> report(Progress("measuring", "0.5", seconds_left=20))
    measuring: 0.5, 60 s left
    """

    def __init__(self, report: Report, *, count: int) -> None:
        self.report, self.count, self.done = report, count, 0
        self._start = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """Tell how far the one under way is."""
        left = progress.seconds_left
        if left is not None:
            each = (time.monotonic() - self._start + left) / (self.done + 1)
            left += (self.count - self.done - 1) * each
        self.report(Progress(progress.task, progress.detail, fraction=progress.fraction, seconds_left=left))

    def next(self) -> None:
        """The one under way is done."""
        self.done += 1


def time_left(seconds: float, fraction: float) -> float | None:
    """How long the rest takes if it goes on like the part that is done; None at the start, when nobody knows.

    >>> time_left(10, 0.25), time_left(10, 0)
    (30.0, None)
    """
    return None if fraction <= 0 else seconds * (1 - fraction) / fraction


def as_duration(seconds: float) -> str:
    """Seconds as people say it.

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


class ProgressLine:
    """A report that shows itself: on a terminal one line of stderr that is written over, elsewhere a line now and then.

    That is when the task changes, and otherwise once a minute; `is_verbose`, the whole line and every five seconds.
    `is_quiet`, it shows nothing. Nothing is shown before `after` seconds of work.
    """

    def __init__(self, *, is_quiet: bool = False, is_verbose: bool = False, after: float = 0.0) -> None:
        self._is_quiet, self._is_verbose = is_quiet, is_verbose
        self._seconds_between = VERBOSE_SECONDS if is_verbose else SECONDS_BETWEEN_LINES
        self._is_terminal = sys.stderr.isatty()
        self._shown_at = time.monotonic()
        self._first = self._shown_at + after
        self._task = ""
        self._is_open = False  # whether something stands on the line

    def __call__(self, progress: str) -> None:
        """Show it in place of what was shown before."""
        now = time.monotonic()
        if self._is_quiet or now < self._first:
            return
        line = Progress.of(progress)
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{printable(line.cut(width))}\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_open = True
        elif not line.task and not self._is_verbose:
            return  # it has not really begun, and may be refused: one line is then enough
        elif line.task != self._task or now - self._shown_at > self._seconds_between:
            is_brief = line.task != self._task and not self._is_verbose
            print(printable(line.task if is_brief else line), file=sys.stderr, flush=True)
            self._shown_at = now
        self._task = line.task

    def say(self, text: str) -> None:
        """A line that stays, above the one that is written over."""
        if not self._is_quiet:
            self.close()
            self._shown_at = time.monotonic()
            print(printable(text), file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        """A line that stays, for those who want to know more."""
        if self._is_verbose:
            self.say(text)

    def close(self) -> None:
        """Wipe the line: nothing is left behind."""
        if self._is_open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_open = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def shown(progress: Report | None) -> Iterator[Report]:
    """The report that a function of Python was given; without one, a line on a terminal where it takes a while."""
    if progress is not None:
        yield progress
    elif not sys.stderr.isatty():
        yield quiet
    else:
        with ProgressLine(after=SECONDS_BEFORE_SHOWN) as line:
            yield line
