"""Finding a data set on disk and reading its files, with one clear line for whatever is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from decomposable.errors import DataError, InvalidArgumentError


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
        raise DataError(f"--data {folder}: {_listed(missing)} missing; to be had from {source}")
    return [folder / name for name in names]


def any_there(folder: Path, names: Iterable[str]) -> bool:
    """Whether at least one of these is a file of the folder."""
    return any((folder / name).is_file() for name in names)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


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
