"""Who watches shows: a line of a terminal that is written over, drawn by tqdm, or lines of a log."""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from decomposable.progress.tracking import Progress, Report, as_duration, joined, quiet
from decomposable_edge.text import printable

SECONDS_BEFORE_SHOWN = 2.0  # what is over sooner needs no line, unless it was asked for
SECONDS_BETWEEN_LINES, VERBOSE_SECONDS = 60.0, 5.0  # where lines cannot be written over
SECONDS_BETWEEN_DRAWINGS, SECONDS_BETWEEN_TICKS = 0.1, 1.0  # where they can; and without any news
SECONDS_BEFORE_COUNTED = 5.0  # without any news, nor a time left: then it says for how long it has been at work
_WIDTHS = (8, 30)  # of a bar: what is narrower says nothing, what is wider no more


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
        return line.but(detail=joined(", ", line.detail, f"{as_duration(now - self._since)} so far"))

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
