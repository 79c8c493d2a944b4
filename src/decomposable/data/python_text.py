"""Real text that every machine with Python has: the sources and the documentation inside the standard library.

    sorted files of the library ─┬─ nine of ten ──▶ training      a sample is `context` bytes, its labels are the bytes
                                 └─ one of ten ───▶ test          that follow each of them

A file's name decides its part, so that the same file is always in the same part. Tests of the library and installed
packages are left out. Which files there are, and what is in them, depends on the version of Python.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from decomposable.data.base import Batch
from decomposable_edge.errors import DataError

_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo"}
)
_LARGEST = 1 << 20  # bytes of a file that is taken: a table of a megabyte is no text
_HELD_OUT = 10  # one file of so many is for the test


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """Hold a text of bytes for each part; a sample is a window of it, and windows do not overlap.

    `most` and `most_test` limit the windows of each part, which are spread over all of the text.
    """

    train: Tensor
    test: Tensor
    context: int
    classes: int = 256  # the values of a byte
    most: int | None = None
    most_test: int | None = None

    @property
    def train_count(self) -> int:
        """Return the number of training windows; one more is left for them to shift in."""
        count = max(0, (len(self.train) - 1) // self.context - 1)
        return count if self.most is None else min(self.most, count)

    @property
    def test_count(self) -> int:
        """Return the number of test windows."""
        count = (len(self.test) - 1) // self.context
        return count if self.most_test is None else min(self.most_test, count)

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """Return these windows, each shifted towards the next one, so that their borders differ in every epoch."""
        apart = (len(self.train) - self.context - 1) // self.train_count
        shifts = torch.randint(apart, (len(indices),), generator=generator)
        return self._windows(self.train, indices * apart + shifts)

    def test_batch(self, indices: Tensor) -> Batch:
        """Return these windows, always the same."""
        return self._windows(self.test, indices * ((len(self.test) - 1) // self.test_count))

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        rows = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return rows[:, :-1], rows[:, 1:]


def load(
    *, context: int = 128, most: int | None = None, most_test: int | None = None, folder: Path | None = None
) -> Text:
    """Load the text of the library that runs this, or of another one's folder."""
    library = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    parts: tuple[list[bytes], list[bytes]] = [], []
    for path in files(library):
        content = path.read_bytes()
        if 0 < len(content) <= _LARGEST:
            parts[is_held_out(path.relative_to(library))].append(content)
    train, test = (torch.tensor(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    text = Text(train=train, test=test, context=context, most=most, most_test=most_test)
    if text.train_count < 1 or text.test_count < 1:
        came = f"{len(train):,} bytes to train with and {len(test):,} to test with, in windows of {context}"
        raise DataError.of(library, f"{came}; allowed: the standard library of a Python, and windows that fit")
    return text


def files(library: Path) -> list[Path]:
    """Return the sources in the order of their names, which is the same on every machine."""
    found: list[Path] = []
    for folder, inside, names in os.walk(library):
        inside[:] = [name for name in inside if name not in _LEFT_OUT]
        found += [path for name in names if name.endswith(".py") and (path := Path(folder, name)).is_file()]
    return sorted(found, key=lambda path: path.relative_to(library).as_posix())


def is_held_out(name: Path) -> bool:
    """Return whether a file of this name is for the test."""
    digest = hashlib.sha256(name.as_posix().encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT == 0
