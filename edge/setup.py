"""Which folders of ../src the device needs; nothing else of the package goes into the wheel."""

import re
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

SOURCE = Path("..") / "src" / "decomposable"
LICENSE = Path("..") / "LICENSE"
PACKAGES = [  # the leaves, and two rooms of their own
    "decomposable",
    "decomposable.progress",
    "decomposable.sizing",
    "decomposable.edge",
]
ONLY_HERE = "decomposable-edge is built from a checkout, whose ../src it takes: pip wheel ./edge"


class Afresh(build_py):
    """Builds these folders and nothing that an earlier build left."""

    def run(self) -> None:
        """Build into an empty folder: what an earlier build left there would go into the wheel as well."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if not self.editable_mode and LICENSE.is_file():
            shutil.copy(LICENSE, Path(self.build_lib) / "decomposable" / "LICENSE")


class Refused(sdist):
    """There is no source distribution: the sources lie outside of this folder, and a wheel of it would be empty."""

    def run(self) -> None:
        """Say so in one line."""
        sys.exit(ONLY_HERE)


if not (SOURCE / "__init__.py").is_file():
    sys.exit(ONLY_HERE)
setup(
    version=re.search(r'__version__ = "(.+)"', (SOURCE / "__init__.py").read_text(encoding="utf-8"))[1],
    packages=PACKAGES,
    package_dir={"decomposable": SOURCE.as_posix()},
    package_data={"decomposable": ["py.typed"]},
    cmdclass={"build_py": Afresh, "sdist": Refused},
)
