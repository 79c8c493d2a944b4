"""Where figures come from: the commit, the machine and the versions that made them."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from decomposable import __version__
from decomposable_edge.machine import Machine

THIS_FILE = Path(__file__).resolve()
PACKAGE = THIS_FILE.parents[1]


def commit() -> str | None:
    """Return the commit of this package's code, with "+changes" if it differs; None outside of a checkout of git."""

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments], cwd=PACKAGE, stderr=subprocess.DEVNULL, text=True).strip()

    try:
        # An installed copy may lie in another project's checkout, whose commit says nothing of it.
        git("ls-files", "--error-unmatch", str(THIS_FILE.relative_to(PACKAGE)))
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, Any]:
    """Return what the numbers, and above all the times, may depend on."""
    here = Machine.here()
    return {
        "cpu": here.cpu,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": here.cores,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "decomposable": __version__,
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of this package, Python and the packages named."""
    installed = {name: metadata.version(name) for name in packages}
    return {"decomposable": __version__, "python": platform.python_version(), **installed}


def without_folders(argument: str) -> str:
    """Return an argument of a command for a record, which does not say where somebody keeps their files."""
    return Path(argument).name if os.path.isabs(argument) else argument


def command_without_folders(command: str) -> str:
    """Return a command for a record."""
    return shlex.join(map(without_folders, shlex.split(command)))
