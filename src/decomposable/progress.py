"""How far a long piece of work is, said in one way by everything that takes long.

    tracker = Tracker(report, "calibrating", total=60, unit="passes")     the one who works counts …
    tracker.update(12, "17 sizes")
        └─▶ report(Progress) ─▶ "calibrating: 12 of 60 passes, 17 sizes, 3 min left"     … the one who watches shows

A `Progress` is text, so `print` and `list.append` are reports too; who draws a bar takes its `fraction`. The command
line shows it by a `ProgressLine`, and so does a function that was given no report, but on a terminal only.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from decomposable_edge.text import printable

_HALF_LIFE, _SHARE = 20.0, 0.25  # seconds, or this part of the time so far: what is older counts half
_SECONDS_TO_JUDGE = 2.0  # before the first guess: what is over sooner needs none
_SMOOTH = 10.0  # seconds in which what is shown follows a guess
_SLOWER, _GRACE = 1.5, 5.0  # so many times as long as was shown, and so many seconds more: it has become slower

SECONDS_BEFORE_SHOWN = 2.0  # what is over sooner needs no line, unless it was asked for
SECONDS_BETWEEN_LINES, VERBOSE_SECONDS = 60.0, 5.0  # where lines cannot be written over
SECONDS_BETWEEN_DRAWINGS, SECONDS_BETWEEN_TICKS = 0.1, 1.0  # where they can; and without any news
SECONDS_BEFORE_COUNTED = 5.0  # without any news, nor a time left: then it says for how long it has been at work
_WIDTHS = (8, 30)  # of a bar: what is narrower says nothing, what is wider no more


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


def _joined(separator: str, *texts: str) -> str:
    return separator.join(filter(None, texts))


Report = Callable[[Progress], None]


def quiet(progress: str) -> None:
    """Show nothing."""


def within(task: str, report: Report) -> Report:
    """Return a report for a part of something larger."""

    def tell(progress: str) -> None:
        line = Progress.of(progress)
        report(line.but(task=task, detail=_joined(": ", line.task, line.detail)))

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
        self.report(Progress(self.task, _joined(", ", count, detail), fraction=self._fraction, seconds_left=left))


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


# Who watches shows


class ProgressLine:
    """A report that shows itself: on a terminal one line that tqdm writes over, elsewhere a line now and then.

    Elsewhere that is when the task changes and once a minute, or with `is_verbose` the whole line every five seconds.
    With `is_quiet` nothing is shown, nor before `after` seconds of work. In a `with`, the time left counts down while
    there is no news.
    """

    def __init__(self, *, is_quiet: bool = False, is_verbose: bool = False, after: float = 0.0) -> None:
        self._is_quiet, self._is_verbose, self._is_terminal = is_quiet, is_verbose, sys.stderr.isatty()
        self._seconds_between = VERBOSE_SECONDS if is_verbose else SECONDS_BETWEEN_LINES
        self._shown_at = self._came = self._since = time.monotonic()
        self._first = self._shown_at + after
        self._line: Progress | None = None  # that came last
        self._shown: str | None = None  # the task that is shown
        self._bar: Any = None
        self._lock, self._stopped = threading.RLock(), threading.Event()

    def __call__(self, progress: str) -> None:
        """Show it in place of what was shown before."""
        if not self._is_quiet:
            with self._lock:
                line, self._came = Progress.of(progress), time.monotonic()
                if self._line is None or self._line.task != line.task:
                    self._since = self._came
                self._line = line
                self._show(self._as_of(line, self._came), self._came)

    def tick(self) -> None:
        """Show what came last as it is now: the time left is shorter."""
        with self._lock:
            if self._line is not None and not self._stopped.is_set():
                now = time.monotonic()
                self._show(self._as_of(self._line, now), now)

    def _as_of(self, line: Progress, now: float) -> Progress:
        """Return what a line says some time after it came."""
        passed = now - self._came
        if line.seconds_left is not None:
            return line.but(seconds_left=max(0.0, line.seconds_left - passed))
        if passed < SECONDS_BEFORE_COUNTED:
            return line
        return line.but(detail=_joined(", ", line.detail, f"{as_duration(now - self._since)} so far"))

    def _show(self, line: Progress, now: float) -> None:
        passed = now - self._shown_at
        is_new = (line.task or line) != self._shown  # what has no task yet is told apart by what it says
        if now < self._first:
            return
        if self._is_terminal:
            if not is_new and passed < SECONDS_BETWEEN_DRAWINGS:
                return  # the next one, or the next tick, is soon enough
            self._draw(line, shutil.get_terminal_size().columns - 1)
        elif not line.task and not self._is_verbose:
            return  # it has not really begun, and may be refused: one line is then enough
        elif is_new or passed > self._seconds_between:
            print(printable(line.task if is_new and not self._is_verbose else line), file=sys.stderr, flush=True)
        else:
            return
        self._shown, self._shown_at = line.task or line, now

    def _draw(self, line: Progress, width: int) -> None:
        drawn = {"n": line.fraction or 0.0, "bar_format": _drawn(line, width), "ncols": width, "nrows": 2}
        if self._bar is None:
            from tqdm import tqdm  # here: most work is never watched

            self._bar = tqdm(total=1.0, initial=drawn.pop("n"), file=sys.stderr, leave=False, **drawn)
        else:
            vars(self._bar).update(drawn)
            self._bar.refresh()

    def say(self, text: str) -> None:
        """Print a line that stays, above the one that is written over."""
        if not self._is_quiet:
            with self._lock:
                self._wipe()
                self._shown_at = time.monotonic()
                print(printable(text), file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        """Print a line that stays, for those who want to know more."""
        if self._is_verbose:
            self.say(text)

    def close(self) -> None:
        """Wipe the line: nothing is left behind."""
        with self._lock:
            self._stopped.set()
            self._wipe()

    def _wipe(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

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


def _drawn(line: Progress, width: int) -> str:
    """Return what tqdm is to draw: task, bar and the rest where there is room for them, else text.

    >>> _drawn(Progress("training", "epoch 3/10", fraction=0.25, seconds_left=90), 50)
    'training {percentage:3.0f}%|{bar:13}| epoch 3/10, 90 s left'
    >>> _drawn(Progress("training", "epoch 3/10, loss 0.123", seconds_left=90), 32)
    'training: epoch 3/10 … 90 s left'
    """
    task, text = printable(line.task), printable(line)
    rest = text.removeprefix(task).removeprefix(": ")
    room = width - len(f"{task} 100%|| {rest}")
    if line.fraction is not None and room >= _WIDTHS[0]:
        return f"{_escaped(task)} {{percentage:3.0f}}%|{{bar:{min(room, _WIDTHS[1])}}}| {_escaped(rest)}"
    if len(text) > width:  # the time left is the last thing to go
        tail = "" if line.seconds_left is None else f" … {as_duration(line.seconds_left)} left"
        text = f"{text[: max(0, width - len(tail))]}{tail}"[:width]
    return _escaped(text)


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def progress_line(options: argparse.Namespace) -> ProgressLine:
    """Return what shows the progress of a verb, as `-q` and `-v` ask for; in a `with`, it is wiped at the end."""
    return ProgressLine(is_quiet=options.quiet, is_verbose=options.verbose)


@contextmanager
def shown(progress: Report | None) -> Iterator[Report]:
    """Give the report that a function of Python was given; without one, a line on a terminal where it takes a while."""
    if progress is not None:
        yield progress
    elif not sys.stderr.isatty():
        yield quiet
    else:
        with ProgressLine(after=SECONDS_BEFORE_SHOWN) as line:
            yield line
