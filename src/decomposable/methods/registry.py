"""The methods that there are, by name: whatever is in `METHODS` is trained, resumed, compared and drawn.

A leaf of this room, so that the settings know those of every method without importing any.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decomposable.methods.base import Method
    from decomposable.methods.values import MethodSettings

METHODS: dict[str, Method] = {}
BUILT_IN: set[str] = set()
"""The names of those that come with the package."""


def kinds(names: Iterable[str] | None = None) -> list[type[MethodSettings]]:
    """The classes of the settings that these methods, or all, have of their own."""
    found = (getattr(METHODS[name], "settings", None) for name in (METHODS if names is None else names))
    return list(dict.fromkeys(kind for kind in found if kind is not None))


def own_defaults(names: Iterable[str] | None = None) -> dict[str, Any]:
    """These settings by name, as they are where nobody sets them."""
    return {name: value for kind in kinds(names) for name, value in vars(kind()).items()}


def of_other_guests(method: str) -> set[str]:
    """The settings of methods that are not built in, but for those that this method has too.

    No training of another method depends on them, and who resumes it need not have registered theirs.
    """
    theirs = own_defaults(METHODS.keys() - BUILT_IN - {method})
    return theirs.keys() - own_defaults(METHODS.keys() & {*BUILT_IN, method}).keys()
