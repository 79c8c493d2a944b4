"""What a run saw, as lines of JSON that are complete the moment they are written, and for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from decomposable.files import write_atomically


class MetricsLog:
    """`metrics.jsonl`: one object per line, each with its "kind" and the number of updates ("step") it follows.

    Where TensorBoard is installed, the numbers go into the folder `tensorboard` beside it as well.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Open the log; what a run that is resumed at `after_step` had logged beyond that is dropped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line for line in read_metrics(path) if line.get("step", 0) <= after_step]
        kept = [line for line in lines if line.get("kind") != "sizes"]  # measured again, after training
        if path.exists():
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = path.open("a")
        self._board = _tensorboard(path.parent / "tensorboard", after_step)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Add a line."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the last one may be cut off where a run was killed."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict):
            lines.append(entry)
    return lines


def _tensorboard(folder: Path, after_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    make: Callable[..., Any] = SummaryWriter
    return make(str(folder), purge_step=after_step + 1 if after_step else None)
