"""Say where the device's package, `decomposable_edge`, comes from.

A wheel depends on the distribution `decomposable-edge` of the same version, so that both can be installed and removed
one by one. An editable install has the package beside this one in `src/`, and its command with it.
"""

import re
import sys
from pathlib import Path

from setuptools import setup

VERSION = re.search(r'__version__ = "(.+)"', Path("src/decomposable_edge/__init__.py").read_text(encoding="utf-8"))[1]
NEEDED = ["torch>=2.6", "numpy>=1.26", "safetensors>=0.4", "filelock>=3.20", "tqdm>=4.66"]
COMMANDS = ["decomposable = decomposable.__main__:main"]

if "editable_wheel" in sys.argv:
    COMMANDS += ["decomposable-edge = decomposable_edge.__main__:main"]
else:
    NEEDED += [f"decomposable-edge=={VERSION}"]

setup(version=VERSION, install_requires=NEEDED, entry_points={"console_scripts": COMMANDS})
