"""One line of a terminal that is written over: a bar where tqdm is installed, and text where it is not."""

from __future__ import annotations

import shutil
import sys
from typing import Any

_WIDTHS = (8, 30)  # of a bar: what is narrower says nothing, what is wider no more


class TerminalLine:
    """The line of stderr that says how far something is."""

    def __init__(self) -> None:
        self._is_open = False  # whether something stands on it

    def write(self, task: str, rest: str, text: str, fraction: float | None) -> None:
        """Write over what stands there: task, bar and rest where there is room for them; else the text."""
        bar = None if fraction is None else with_bar(task, rest, fraction, self.width)
        print(f"\r{bar or text}\x1b[K", end="", file=sys.stderr, flush=True)
        self._is_open = True

    @property
    def width(self) -> int:
        """How many letters there is room for."""
        return shutil.get_terminal_size().columns - 1

    def wipe(self) -> None:
        """Leave nothing behind."""
        if self._is_open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_open = False


def with_bar(task: str, rest: str, fraction: float, width: int) -> str | None:
    """What is done, a bar, and what there is to say of it; None without tqdm, or where the line is too short.

    >>> with_bar("calibrating", "12 of 48 sizes", 0.25, 20) is None
    True
    """
    tqdm = _tqdm()
    around = len(f"{task} 100%|| {rest}")
    if tqdm is None or around + _WIDTHS[0] > width:
        return None
    task, rest = (text.replace("{", "{{").replace("}", "}}") for text in (task, rest))
    drawn: str = tqdm.format_meter(
        n=fraction,
        total=1.0,
        elapsed=0.0,
        ncols=min(width, around + _WIDTHS[1]),
        ascii=not _can_draw_blocks(),
        bar_format=f"{task} {{percentage:3.0f}}%|{{bar}}| {rest}",
    )
    return drawn.rstrip()


def _tqdm() -> Any:
    """The class that draws bars; None where it is not installed: nothing depends on it."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm


def _can_draw_blocks() -> bool:
    try:
        "█▏".encode(sys.stderr.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
