"""Which part of an export is under way, and how much of it is done."""

from __future__ import annotations

from decomposable.progress import Report, Tracker

TRACING, TRANSLATING, SIMPLIFYING, COMPARING = (
    "tracing the network",
    "translating it to ONNX",
    "simplifying the graph",
    "comparing it with PyTorch",
)
_SHARES = {TRACING: 0.4, TRANSLATING: 0.4, SIMPLIFYING: 0.05, COMPARING: 0.15}  # of the time: a U-Net, a detector


class Stages:
    """Tells of each stage as it begins, and of the last one size by size.

    >>> stages = Stages(print)
    >>> stages.begin(TRANSLATING)
    exporting: translating it to ONNX
    """

    def __init__(self, report: Report) -> None:
        self._tracker = Tracker(report, "exporting", total=1.0)

    def begin(self, stage: str, part: float = 0.0, detail: str = "") -> None:
        """A stage is under way, and such a part of it done."""
        names = list(_SHARES)
        before = sum(_SHARES[name] for name in names[: names.index(stage)])
        self._tracker.update(before + part * _SHARES[stage], ", ".join(filter(None, (stage, detail))))
