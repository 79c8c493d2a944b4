"""`python -m decomposable` is the command `decomposable`."""

import sys

from decomposable.cli import main

sys.exit(main())
