"""The metrics of a run, as lines of JSON that are complete the moment they are written, and for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from decomposable_edge.files import write_atomically


class MetricsLog:
    """`metrics.jsonl`: one object a line, each with its "kind" and the number of updates ("step") it follows.

    If TensorBoard is installed, the numbers go into the folder `tensorboard` beside it as well. Without a path nothing
    is written: only the first process of a run writes.
    """

    def __init__(self, path: Path | None, *, after_step: int) -> None:
        """Keep what a run that is resumed at `after_step` had logged until then; the rest is dropped at the first line.

        Not before, because a run that cannot go on must change nothing.
        """
        self.path, self.after_step = path, after_step
        self._file: TextIO | None = None
        self._board: Any = None

    def _open(self, path: Path) -> TextIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line for line in read_metrics(path) if line["step"] <= self.after_step]
        kept = [line for line in lines if line.get("kind") != "sizes"]  # measured again, after training
        if path.exists():
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            pass
        else:
            purged = self.after_step + 1 if self.after_step else None
            self._board = SummaryWriter(str(path.parent / "tensorboard"), purge_step=purged)
        return path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Add a line."""
        if self.path is None:
            return
        self._file = self._file or self._open(self.path)
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        for each in (self._file, self._board):
            if each is not None:
                each.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all whole lines; the last one may be cut off if a run was killed."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            lines.append(entry)
    return lines
