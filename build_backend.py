"""Build `decomposable` with setuptools.

All of setuptools' hooks but one: without `prepare_metadata_for_build_editable`, pip reads the metadata of an editable
install from the wheel that `build_editable` makes. So setup.py sees which of the two it is asked for.
"""

from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]
