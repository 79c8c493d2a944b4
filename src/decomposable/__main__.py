"""Where the commands begin: `python -m decomposable` is `decomposable`; `decomposable-edge` comes with both
distributions.
"""

import sys

from decomposable.console import CALLED_WRONG, FAILED, INTERRUPTED
from decomposable.errors import MissingExtraError
from decomposable.machine import keep_freed_memory


def main() -> int:
    """`decomposable`; the exit code comes back."""
    try:
        from decomposable.commands.main import main as run
    except ModuleNotFoundError as error:
        if error.name != "decomposable.commands":
            raise
        sys.stderr.write("decomposable: error: this is decomposable-edge, for devices; use decomposable-edge\n")
        return CALLED_WRONG
    keep_freed_memory()
    return run()


def edge() -> int:
    """`decomposable-edge`; of the full distribution, the packages that it needs are an extra."""
    try:
        from decomposable.edge.command import main as run

        return run()
    except MissingExtraError as error:
        sys.stderr.write(f"decomposable-edge: error: {error}\n")
        return FAILED
    except KeyboardInterrupt:  # while it was being imported
        sys.stderr.write("decomposable-edge: interrupted\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
