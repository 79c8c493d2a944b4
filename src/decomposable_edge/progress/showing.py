"""Who watches shows: a line of a terminal that is written over, or lines of a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from decomposable_edge.progress.line import Progress, Report, quiet
from decomposable_edge.progress.pace import as_duration
from decomposable_edge.progress.terminal import TerminalLine
from decomposable_edge.text import printable

SECONDS_BEFORE_SHOWN = 2.0  # what is over sooner needs no line, unless it was asked for
SECONDS_BETWEEN_LINES, VERBOSE_SECONDS = 60.0, 5.0  # where lines cannot be written over
SECONDS_BETWEEN_DRAWINGS, SECONDS_BETWEEN_TICKS = 0.1, 1.0  # where they can; and without any news
SECONDS_BEFORE_COUNTED = 5.0  # without any news, nor a time left: then it says for how long it has been at work


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
        is_new = (line.task or line) != self._shown  # what has no task yet is told apart by what it says
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
        self._shown, self._shown_at = line.task or line, now

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
