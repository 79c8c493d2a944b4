"""Run the command `decomposable-lab`, also as ``python -m decomposable_lab``."""

import sys

from decomposable_lab.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
