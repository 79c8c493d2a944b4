"""Find the files of a data set and read them; whatever is wrong is said in one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from decomposable.data.base import Images
from decomposable_edge.errors import DataError, InvalidArgumentError


def given(folder: Path | str | None, what: str, source: str) -> Path:
    """Return the folder that `--data` names, if there is one."""
    allowed = f"a folder with {what}, to be had from {source}"
    if folder is None:
        raise InvalidArgumentError.about("--data", None, allowed, text=f"--data is needed: {allowed}")
    path = Path(folder).expanduser()
    if not path.is_dir():
        came = "not a folder" if path.exists() else "no such folder"
        raise DataError.about("--data", path, allowed, f"--data {path}: {came}; allowed: {allowed}")
    return path


def find(
    folder: Path | str | None, names: Sequence[str], *, inside: Sequence[str], what: str, source: str, ending: str = ""
) -> list[Path]:
    """Return these files of a folder, or of one of the folders `inside` it; a name may have the `ending`."""
    root = given(folder, what, source)
    for place in (root, *(root / name for name in inside)):
        files = [place / name if (place / name).is_file() else place / (name + ending) for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if not missing:
            return files
        if len(missing) < len(names):
            raise DataError(f"--data {place}: without {listed(missing)}; allowed: {what}, to be had from {source}")
    raise DataError(f"--data {root}: no file of {what}; allowed: a folder with these, to be had from {source}")


def listed(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def labelled(pixels: np.ndarray, labels: np.ndarray, classes: int, file: Path) -> Images:
    """Return images with the labels of a file; refuse labels that are no class."""
    wrong = np.flatnonzero(labels >= classes)
    if len(wrong):
        raise DataError.of(file, f"image {wrong[0] + 1:,} has label {labels[wrong[0]]}; allowed: 0 to {classes - 1}")
    return Images(torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64)))
