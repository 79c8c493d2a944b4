"""Finding a data set on disk and reading its files, with one clear line for whatever is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from decomposable_edge.errors import DataError, InvalidArgumentError


def given(folder: Path | str | None, what: str, source: str) -> Path:
    """The folder that was given, if it is one."""
    if folder is None:
        raise InvalidArgumentError(f"--data is needed: a folder with {what}, to be had from {source}")
    path = Path(folder).expanduser()
    if not path.is_dir():
        came = "not a folder" if path.exists() else "no such folder"
        raise DataError(f"--data {path}: {came}; allowed: a folder with {what}, to be had from {source}")
    return path


def all_there(folder: Path, names: Sequence[str], source: str) -> list[Path]:
    """These files of a folder, if none is missing."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise DataError(f"--data {folder}: {listed(missing)} {are} missing; to be had from {source}")
    return [folder / name for name in names]


def none_there(folder: Path, name: str, what: str, source: str) -> DataError:
    """The error of a folder that has no file of a data set."""
    return DataError(
        f"--data {folder}: no file of {name} in it; allowed: a folder with {what}, or its parent; "
        f"to be had from {source}"
    )


def listed(names: Sequence[str]) -> str:
    """The first of these, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def read_bytes(file: Path, limit: int) -> bytes:
    """The whole file, unless it is larger than any file of the data set can be."""
    try:
        with file.open("rb") as stream:
            content = stream.read(limit + 1)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or error})") from error
    if len(content) > limit:
        raise DataError(f"{file}: {file.stat().st_size:,} bytes; allowed: at most {limit:,}")
    return content


def check_labels(file: Path, labels: np.ndarray, classes: int) -> None:
    """Refuse labels that are no class."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(f"{file}: image {wrong[0] + 1:,} has label {labels[wrong[0]]}; allowed: 0 to {classes - 1}")
