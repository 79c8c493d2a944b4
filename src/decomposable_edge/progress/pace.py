"""How long work still takes, by its pace of late; and a time left that falls.

    done, total ──▶ Pace ── seconds left, if it goes on like this ──▶ Countdown ── what is shown

A pace is a guess, and guesses go up and down. Whoever waits wants to know when it is over: what is shown falls as time
passes, and grows only where the work has become so much slower that anything else would be a lie.
"""

from __future__ import annotations

_HALF_LIFE, _SHARE = 20.0, 0.25  # seconds, or this part of the time so far: what is older counts half
_SECONDS_TO_JUDGE = 2.0  # before the first guess: what is over sooner needs none
_SMOOTH = 10.0  # seconds in which what is shown follows a guess
_SLOWER, _GRACE = 1.5, 5.0  # so many times as long as was shown, and so many seconds more: it has become slower


class Pace:
    """Seconds for a unit of work. The last ones count more: a slow start, or a busy minute, is forgotten."""

    def __init__(self, now: float) -> None:
        self._begun = self._at = now
        self._done = 0.0
        self._seconds = self._units = 0.0  # of late

    def left(self, now: float, done: float, total: float) -> float | None:
        """How long the rest takes if it goes on like this; None at the start, when nobody knows."""
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

    >>> countdown = Countdown()
    >>> [countdown.shown(now, guess) for now, guess in [(0, 60), (10, 70), (20, 30), (30, 120)]]
    [60, 60, 30.0, 120]
    """

    def __init__(self) -> None:
        self._left: float | None = None  # as it was shown last
        self._at = 0.0

    def shown(self, now: float, guess: float | None) -> float | None:
        """What to show at a time, given what is guessed then; None as long as there was no guess."""
        if self._left is None or guess is None:
            before = None if self._left is None else max(0.0, self._left - (now - self._at))
            self._left = before if guess is None else guess
        else:
            self._left = _followed(self._left, now - self._at, guess)
        self._at = now
        return self._left


def _followed(last: float, passed: float, guess: float) -> float:
    """What to show after what was shown last, so many seconds ago."""
    before = max(0.0, last - passed)
    if guess <= 0 or guess > _SLOWER * before + _GRACE:
        return guess
    return min(last, before + (guess - before) * min(1.0, passed / _SMOOTH))


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
