"""How far a long piece of work is, said in one way by everything that takes long.

    tracker = Tracker(report, "calibrating", total=60, unit="passes")     the one who works counts …
    tracker.update(12, "17 sizes")
        └─▶ report(Progress) ─▶ "calibrating: 12 of 60 passes, 17 sizes, 3 min left"     … the one who watches shows

A `Progress` is text, so `print` and `list.append` are reports too; who draws a bar takes its `fraction`. The command
line shows it by a `ProgressLine`, and so does a function that was given no report, but on a terminal only.
"""

from __future__ import annotations

from decomposable.progress.showing import ProgressLine as ProgressLine
from decomposable.progress.showing import progress_line as progress_line
from decomposable.progress.showing import shown as shown
from decomposable.progress.tracking import InTurn as InTurn
from decomposable.progress.tracking import Progress as Progress
from decomposable.progress.tracking import Report as Report
from decomposable.progress.tracking import Steps as Steps
from decomposable.progress.tracking import Tracker as Tracker
from decomposable.progress.tracking import as_duration as as_duration
from decomposable.progress.tracking import quiet as quiet
from decomposable.progress.tracking import within as within
