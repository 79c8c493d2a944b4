"""What a run saw, as lines of JSON that are complete the moment they are written, and for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from decomposable_edge.files import write_atomically


class MetricsLog:
    """`metrics.jsonl`: one object per line, each with its "kind" and the number of updates ("step") it follows.

    Where TensorBoard is installed, the numbers go into the folder `tensorboard` beside it as well.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Take what a run that is resumed at `after_step` had logged until then; the rest is dropped at the first line.

        Not before, because a run that cannot go on must change nothing.
        """
        self.path, self.after_step = path, after_step
        self._file: TextIO | None = None
        self._board: Any = None

    def _open(self) -> TextIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line for line in read_metrics(self.path) if line["step"] <= self.after_step]
        kept = [line for line in lines if line.get("kind") != "sizes"]  # measured again, after training
        if self.path.exists():
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            pass
        else:
            purged = self.after_step + 1 if self.after_step else None
            self._board = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=purged)
        return self.path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Add a line."""
        if self._file is None:
            self._file = self._open()
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


class NoMetrics(MetricsLog):
    """Of a process that is not the first of its run: nothing is written."""

    def __init__(self) -> None:
        self._file = self._board = None

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """No line."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the last one may be cut off where a run was killed."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            lines.append(entry)
    return lines
