"""Which modules of ../src the device needs; nothing else of the package goes into the wheel."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE = Path("..") / "src" / "decomposable"
MODULES = {
    "decomposable": {
        *("__init__", "cost", "errors", "files", "interpolation"),
        *("latency", "profiles", "ranks", "shrunk", "timing"),
    },
    "decomposable.bench": {"__init__", "sweep"},
    "decomposable.commands": {"__init__", "verb"},
    "decomposable.edge": None,  # all of them
    "decomposable.storage": {"__init__", "fields"},
}


class Selected(build_py):
    """Builds the modules that are listed, and no others of their packages."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of a package that take part."""
        wanted = MODULES[package]
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if wanted is None or module[1] in wanted]


setup(
    version=re.search(r'__version__ = "(.+)"', (SOURCE / "__init__.py").read_text(encoding="utf-8"))[1],
    packages=list(MODULES),
    package_dir={"decomposable": SOURCE.as_posix()},
    package_data={"decomposable": ["py.typed"]},
    cmdclass={"build_py": Selected},
)
