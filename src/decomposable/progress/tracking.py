"""Who works counts: one piece of work, several in turn, several of different kinds."""

from __future__ import annotations

import time

from decomposable.progress.line import Progress, Report

_HALF_LIFE, _SHARE = 20.0, 0.25  # seconds, or this part of the time so far: what is older counts half
_SECONDS_TO_JUDGE = 2.0  # before the first guess: what is over sooner needs none
_SMOOTH = 10.0  # seconds in which what is shown follows a guess
_SLOWER, _GRACE = 1.5, 5.0  # so many times as long as was shown, and so many seconds more: it has become slower


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
    """The time left as it is shown: it follows the guesses slowly, and does not grow from one to the next.

    It grows only where the work has become so much slower that anything else would be a lie. (tqdm shows the guess
    itself, which goes up and down.)

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
