"""How far a long piece of work is, said in one way by everything that takes long.

    tracker = Tracker(report, "calibrating", total=60, unit="passes")     the one who works counts …
    tracker.update(12, "17 sizes")
        └─▶ report(Progress) ─▶ "calibrating: 12 of 60 passes, 17 sizes, 3 min left"     … the one who watches shows

A `Progress` is text, so `print` and `list.append` are reports too; who draws a bar takes its `fraction`. The command
line shows it by a `ProgressLine`, and so does a function that was given no report, but on a terminal only. How long
the rest takes is guessed in `pace.py`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from decomposable.pace import Countdown, Pace, as_duration
from decomposable.terminal import TerminalLine
from decomposable.text import printable

SECONDS_BEFORE_SHOWN = 2.0  # what is over sooner needs no line, unless it was asked for
SECONDS_BETWEEN_LINES, VERBOSE_SECONDS = 60.0, 5.0  # where lines cannot be written over
SECONDS_BETWEEN_DRAWINGS, SECONDS_BETWEEN_TICKS = 0.1, 1.0  # where they can; and without any news
SECONDS_BEFORE_COUNTED = 5.0  # without any news, nor a time left: then it says for how long it has been at work


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


class Tracker:
    """Counts one piece of work, and tells how far it is; the time left follows from the pace of late.

    Work of several kinds has a weight for each, so that a unit takes about as long as any other. Without a `unit`, what
    is said of the count is the detail: weights are nothing to read.

    >>> tracker = Tracker(print, "measuring", total=4, unit="sizes")
    >>> tracker.update(0, "0.5")
    measuring: 0 of 4 sizes, 0.5
    """

    def __init__(self, report: Report, task: str, *, total: float, unit: str = "") -> None:
        self.report, self.task, self.total, self.unit = report, task, total, unit
        self._pace, self._countdown, self._fraction = Pace(time.monotonic()), Countdown(), 0.0

    def update(self, done: float, detail: str = "", *, total: float | None = None) -> None:
        """So much is done; `detail` is what else there is to say, `total` what is now thought to be the whole work.

        The part that is done does not shrink where the work turns out to be more.
        """
        self.total = self.total if total is None else total
        self._fraction = max(self._fraction, min(1.0, done / self.total) if self.total > 0 else 1.0)
        count = f"{counted(done)} of {counted(self.total)} {self.unit}" if self.unit else ""
        now = time.monotonic()
        left = self._countdown.shown(now, self._pace.left(now, done, self.total))
        text = ", ".join(filter(None, (count, detail)))
        self.report(Progress(self.task, text, fraction=self._fraction, seconds_left=left))


def counted(number: float) -> str:
    """A count as it is read: what is not whole, with three digits.

    >>> counted(12), counted(4.517), counted(25000.0)
    ('12', '4.52', '25,000')
    """
    return f"{number:,.0f}" if number == round(number) or number >= 1000 else f"{number:.3g}"


class InTurn:
    """A report for several pieces of work, one after the other, that take about as long as each other.

    The time left, and the part that is done, is that of all of them.

    >>> report = InTurn(print, count=3)
    >>> report(Progress("measuring", "0.5", seconds_left=20))
    measuring: 0.5, 60 s left
    """

    def __init__(self, report: Report, *, count: int) -> None:
        self.report, self.count, self.done = report, count, 0
        self._start, self._countdown = time.monotonic(), Countdown()

    def __call__(self, progress: Progress) -> None:
        """Tell how far the one under way is."""
        left, now = progress.seconds_left, time.monotonic()
        if left is not None:
            each = (now - self._start + left) / (self.done + 1)
            left = self._countdown.shown(now, left + (self.count - self.done - 1) * each)
        fraction = None if progress.fraction is None else (self.done + progress.fraction) / self.count
        self.report(progress.but(fraction=fraction, seconds_left=left))

    def next(self) -> None:
        """The one under way is done."""
        self.done += 1


class Steps:
    """A report for pieces of work of different kinds, one after the other; the time left is that of each.

    >>> report = Steps(print, count=3)
    >>> report.next()
    >>> report(Progress("calibrating", "12 of 48 sizes", seconds_left=20))
    calibrating (step 2 of 3): 12 of 48 sizes, 20 s left
    """

    def __init__(self, report: Report, *, count: int) -> None:
        self.report, self.count, self.number = report, count, 1

    def __call__(self, progress: str) -> None:
        """Tell how far the one under way is."""
        line = Progress.of(progress)
        named = f"{line.task} (step {self.number} of {self.count})" if line.task else ""
        self.report(line.but(task=named))

    def next(self) -> None:
        """The one under way is done."""
        self.number += 1


class ProgressLine:
    """A report that shows itself: on a terminal one line of stderr that is written over, elsewhere a line now and then.

    That is when the task changes, and otherwise once a minute; `is_verbose`, the whole line and every five seconds.
    `is_quiet`, it shows nothing. Nothing is shown before `after` seconds of work.

    In a `with`, the time left counts down while there is no news, and what has to be shown is shown on time.
    """

    def __init__(self, *, is_quiet: bool = False, is_verbose: bool = False, after: float = 0.0) -> None:
        self._is_quiet, self._is_verbose = is_quiet, is_verbose
        self._seconds_between = VERBOSE_SECONDS if is_verbose else SECONDS_BETWEEN_LINES
        self._terminal = TerminalLine() if sys.stderr.isatty() else None
        self._shown_at = time.monotonic()
        self._first = self._shown_at + after
        self._news: _News | None = None  # that came last
        self._shown: str | None = None  # the task that is shown
        self._lock, self._stopped = threading.RLock(), threading.Event()

    def __call__(self, progress: str) -> None:
        """Show it in place of what was shown before."""
        if not self._is_quiet:
            now, line = time.monotonic(), Progress.of(progress)
            with self._lock:
                is_same = self._news is not None and self._news.line.task == line.task
                self._news = _News(line, now, self._news.since if self._news and is_same else now)
                self._show(self._news, now)

    def tick(self) -> None:
        """Show what came last as it is now: the time left is shorter."""
        with self._lock:
            if self._news is not None and not self._stopped.is_set():
                self._show(self._news, time.monotonic())

    def _show(self, news: _News, now: float) -> None:
        if now < self._first:
            return
        line, passed = news.at(now), now - self._shown_at
        is_new = line.task != self._shown
        if self._terminal is not None:
            if not is_new and passed < SECONDS_BETWEEN_DRAWINGS:
                return  # the next one, or the next tick, is soon enough
            text = printable(line.cut(self._terminal.width))
            self._terminal.write(printable(line.task), printable(line.rest), text, line.fraction)
        elif not line.task and not self._is_verbose:
            return  # it has not really begun, and may be refused: one line is then enough
        elif is_new or passed > self._seconds_between:
            print(printable(line.task if is_new and not self._is_verbose else line), file=sys.stderr, flush=True)
        else:
            return
        self._shown, self._shown_at = line.task, now

    def say(self, text: str) -> None:
        """A line that stays, above the one that is written over."""
        if not self._is_quiet:
            with self._lock:
                self._wipe()
                self._shown_at = time.monotonic()
                print(printable(text), file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        """A line that stays, for those who want to know more."""
        if self._is_verbose:
            self.say(text)

    def close(self) -> None:
        """Wipe the line: nothing is left behind."""
        with self._lock:
            self._stopped.set()
            self._wipe()

    def _wipe(self) -> None:
        if self._terminal is not None:
            self._terminal.wipe()

    def __enter__(self) -> ProgressLine:
        if not self._is_quiet:
            threading.Thread(target=self._tick_on, name="progress", daemon=True).start()
        return self

    def _tick_on(self) -> None:
        while not self._stopped.wait(SECONDS_BETWEEN_TICKS):
            try:
                self.tick()
            except (OSError, ValueError):  # nobody reads it any more
                return

    def __exit__(self, *error: object) -> None:
        self.close()


class _News(NamedTuple):
    """A line, when it came, and since when its task is under way."""

    line: Progress
    came: float
    since: float

    def at(self, now: float) -> Progress:
        """What it says at another time."""
        line, passed = self.line, now - self.came
        if line.seconds_left is not None:
            return line.but(seconds_left=max(0.0, line.seconds_left - passed))
        if passed < SECONDS_BEFORE_COUNTED:
            return line
        return line.but(detail=", ".join(filter(None, (line.detail, f"{as_duration(now - self.since)} so far"))))


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
