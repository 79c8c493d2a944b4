"""`decomposable-edge`, which comes with both distributions. Of the full one, the packages it needs are an extra."""

from __future__ import annotations

import sys

from decomposable.errors import MissingExtraError

FAILED, INTERRUPTED = 1, 130


def main() -> int:
    """Run `decomposable.edge.command`; the exit code comes back."""
    try:
        from decomposable.edge.command import main as run

        return run()
    except MissingExtraError as error:
        sys.stderr.write(f"decomposable-edge: error: {error}\n")
        return FAILED
    except KeyboardInterrupt:  # while it was being imported
        sys.stderr.write("decomposable-edge: interrupted\n")
        return INTERRUPTED
