"""How far a long piece of work is, said in one way by everything that takes long.

    tracker = Tracker(report, "calibrating", total=60, unit="passes")     the one who works counts …
    tracker.update(12, "17 sizes")
        └─▶ report(Progress) ─▶ "calibrating: 12 of 60 passes, 17 sizes, 3 min left"     … the one who watches shows

A `Progress` is text, so `print` and `list.append` are reports too; who draws a bar takes its `fraction`. The command
line shows it by a `ProgressLine`, and so does a function that was given no report, but on a terminal only.
"""

from __future__ import annotations

from decomposable.progress.line import Progress, Report, as_duration, quiet, within
from decomposable.progress.showing import ProgressLine, progress_line, shown
from decomposable.progress.tracking import InTurn, Steps, Tracker

__all__ = [
    "InTurn",
    "Progress",
    "ProgressLine",
    "Report",
    "Steps",
    "Tracker",
    "as_duration",
    "progress_line",
    "quiet",
    "shown",
    "within",
]
