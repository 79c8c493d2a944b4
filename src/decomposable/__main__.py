"""Run the command `decomposable`, also as ``python -m decomposable``."""

import sys

from decomposable.commands.main import main as run
from decomposable_edge.machine import keep_freed_memory


def main() -> int:
    """Run one command; return the exit code."""
    keep_freed_memory()
    return run()


if __name__ == "__main__":
    sys.exit(main())
