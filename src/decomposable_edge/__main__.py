"""Run the command `decomposable-edge`, also as ``python -m decomposable_edge``."""

import sys

from decomposable_edge.console import FAILED, INTERRUPTED
from decomposable_edge.errors import MissingExtraError, needs_extra


def main() -> int:
    """Run one command; return the exit code."""
    try:
        with needs_extra():
            from decomposable_edge.command import main as run

            return run()
    except MissingExtraError as error:
        sys.stderr.write(f"decomposable-edge: error: {error}\n")
        return FAILED
    except KeyboardInterrupt:  # while it was being imported
        sys.stderr.write("decomposable-edge: interrupted\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
