"""``python -m decomposable.edge``."""

import sys

from decomposable.edge.command import main

if __name__ == "__main__":
    sys.exit(main())
