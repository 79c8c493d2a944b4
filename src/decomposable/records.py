"""Where figures come from: the commit, the machine and the versions that made them."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from decomposable import __version__

PACKAGE = Path(__file__).resolve().parent


def commit() -> str | None:
    """The commit of this package's code, with "+changes" where it differs; None where it is not a checkout of git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "records.py")  # an installed copy may lie in another project's checkout
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, Any]:
    """What the numbers, and above all the times, may depend on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "decomposable": __version__,
    }


def versions(*packages: str) -> dict[str, str]:
    """Of this package, Python and the packages named."""
    installed = {name: metadata.version(name) for name in packages}
    return {"decomposable": __version__, "python": platform.python_version(), **installed}


def now() -> str:
    """The date and time, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def without_folders(argument: str) -> str:
    """Where somebody keeps their files is not part of a record."""
    return Path(argument).name if os.path.isabs(argument) else argument
