"""A line about work that is under way, and who counts: one piece of work, several in turn, or of several kinds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_HALF_LIFE, _SHARE = 20.0, 0.25  # seconds, or this part of the time so far: what is older counts half
_SECONDS_TO_JUDGE = 2.0  # before the first guess: what is over sooner needs none
_SMOOTH = 10.0  # seconds in which what is shown follows a guess
_SLOWER, _GRACE = 1.5, 5.0  # so many times as long as was shown, and so many seconds more: it has become slower


class Progress(str):
    """A line about work that is under way: its text, and what a program would want to know of it.

    `task` is empty while things are made ready, `fraction` is the part that is done, None where nobody knows.

    >>> line = Progress("training", "epoch 3/10", fraction=0.25, seconds_left=90)
    >>> line, line.task, line.fraction, line.seconds_left
    ('training: epoch 3/10, 90 s left', 'training', 0.25, 90)
    """

    task: str
    detail: str
    fraction: float | None
    seconds_left: float | None

    def __new__(
        cls, task: str, detail: str = "", *, fraction: float | None = None, seconds_left: float | None = None
    ) -> Progress:
        """Put the line together."""
        left = "" if seconds_left is None else f"{as_duration(seconds_left)} left"
        line = super().__new__(cls, joined(": ", task, joined(", ", detail, left)))
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


def joined(separator: str, *texts: str) -> str:
    """Return the texts that are not empty as one."""
    return separator.join(filter(None, texts))


Report = Callable[[Progress], None]


def quiet(progress: str) -> None:
    """Show nothing."""


def within(task: str, report: Report) -> Report:
    """Return a report for a part of something larger."""

    def tell(progress: str) -> None:
        line = Progress.of(progress)
        report(line.but(task=task, detail=joined(": ", line.task, line.detail)))

    return tell


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


# Who works counts


class Pace:
    """Seconds for a unit of work. The last ones count more: a slow start, or a busy minute, is forgotten."""

    def __init__(self, now: float) -> None:
        self._begun = self._at = now
        self._done = self._seconds = self._units = 0.0  # the last two of late

    def left(self, now: float, done: float, total: float) -> float | None:
        """Return how long the rest takes if it goes on like this; None at the start, when nobody knows."""
        units, seconds, so_far = done - self._done, now - self._at, now - self._begun
        if units > 0:
            kept = 0.5 ** (seconds / max(_HALF_LIFE, _SHARE * so_far))
            self._seconds, self._units = kept * self._seconds + seconds, kept * self._units + units
            self._at, self._done, seconds = now, done, 0.0
        if done >= total:
            return 0.0
        if self._units <= 0 or so_far < _SECONDS_TO_JUDGE:
            return None
        return max(0.0, (total - done) * self._seconds / self._units - seconds)


class Countdown:
    """The time left as it is shown: it follows the guesses slowly, and grows only where work has become much slower.

    (tqdm shows the guess itself, which goes up and down.)

    >>> countdown = Countdown()
    >>> [countdown.shown(now, guess) for now, guess in [(0, 60), (10, 70), (20, 30), (30, 120)]]
    [60, 60, 30.0, 120]
    """

    def __init__(self) -> None:
        self._left: float | None = None  # as it was shown last
        self._at = 0.0

    def shown(self, now: float, guess: float | None) -> float | None:
        """Return what to show at a time, given what is guessed then; None as long as there was no guess."""
        last, passed, self._at = self._left, now - self._at, now
        if last is None:
            self._left = guess
            return guess
        before = max(0.0, last - passed)
        if guess is None:
            self._left = before
        elif guess <= 0 or guess > _SLOWER * before + _GRACE:
            self._left = guess
        else:
            self._left = min(last, before + (guess - before) * min(1.0, passed / _SMOOTH))
        return self._left


class Tracker:
    """Counts one piece of work, and tells how far it is; the time left follows from the latest pace.

    Work of several kinds has a weight for each, so that a unit takes about as long as any other. Without a `unit`, only
    the detail is said of the count.

    >>> tracker = Tracker(print, "measuring", total=4, unit="sizes")
    >>> tracker.update(0, "0.5")
    measuring: 0 of 4 sizes, 0.5
    """

    def __init__(self, report: Report, task: str, *, total: float, unit: str = "") -> None:
        self.report, self.task, self.total, self.unit = report, task, total, unit
        self._pace, self._countdown, self._fraction = Pace(time.monotonic()), Countdown(), 0.0

    def update(self, done: float, detail: str = "", *, total: float | None = None) -> None:
        """Tell that so much is done; `total` is what is now thought to be the whole work.

        The part that is done does not shrink where the work turns out to be more.
        """
        self.total = self.total if total is None else total
        self._fraction = max(self._fraction, min(1.0, done / self.total) if self.total > 0 else 1.0)
        count = f"{_counted(done)} of {_counted(self.total)} {self.unit}" if self.unit else ""
        now = time.monotonic()
        left = self._countdown.shown(now, self._pace.left(now, done, self.total))
        self.report(Progress(self.task, joined(", ", count, detail), fraction=self._fraction, seconds_left=left))


def _counted(number: float) -> str:
    """Return a count as it is read: what is not whole, with three digits.

    >>> _counted(12), _counted(4.517), _counted(25000.0)
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
        """Begin the next one."""
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
        self.report(line.but(task=f"{line.task} (step {self.number} of {self.count})" if line.task else ""))

    def next(self) -> None:
        """Begin the next one."""
        self.number += 1
