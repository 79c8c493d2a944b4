"""The methods that there are, by name: whatever is in `METHODS` is trained and resumed.

The library has three. `register` takes more: those of the laboratory (`import decomposable_lab`) and your own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import Field, fields
from typing import Any

from decomposable.recipes.settings import Settings
from decomposable.recipes.values import MethodSettings
from decomposable.training.methods.base import Method
from decomposable_edge.errors import LABORATORY, InvalidArgumentError
from decomposable_edge.text import first_line

METHODS: dict[str, Method] = {}
IN_THE_LABORATORY = ("width", "scratch", "trp", "tucker", "slimmable", "us-net")
"""Methods to compare with, which are not part of the library: who asks for one is told where it is."""

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def register(method: Method) -> None:
    """Have a method trained and resumed under its name, and its settings known."""
    if not isinstance(method, Method):
        raise InvalidArgumentError(f"method={method!r:.80}; allowed: an object of a class that is a Method")
    name = getattr(method, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "all":  # it becomes a folder
        raise InvalidArgumentError(f"method={name!r:.80}; allowed: a name of letters a to z and digits, as in us-net")
    if not isinstance(getattr(method, "summary", None), str):
        raise InvalidArgumentError(f"method={name}: there is no summary of it; allowed: one line")
    if METHODS.get(name, method) is not method:
        raise InvalidArgumentError(f"method={name}: there is one of this name; allowed: another name")
    if method.settings is not None:
        _check_settings(name, method.settings)
    METHODS[name] = method


def find(name: str) -> Method:
    """Return the method of that name; an unknown one is refused with the nearest."""
    if name in METHODS:
        return METHODS[name]
    if name in IN_THE_LABORATORY:
        raise InvalidArgumentError(
            f"method={name}: it is one of the laboratory, {LABORATORY}; allowed here: {', '.join(METHODS)}"
        )
    near = difflib.get_close_matches(name.lower().replace("_", "-"), METHODS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InvalidArgumentError(f"method={name}; {hint}allowed: {', '.join(METHODS)}")


def kinds(names: Iterable[str] | None = None) -> list[type[MethodSettings]]:
    """Return the classes of the settings that these methods, or all, have of their own."""
    found = (METHODS[name].settings for name in (METHODS if names is None else names))
    return list(dict.fromkeys(kind for kind in found if kind is not None))


def of_other_methods(method: str) -> set[str]:
    """Return the names of settings that other methods have of their own and this one has not.

    No training of this one depends on them: who goes on with it may have others, or have registered other methods.
    """
    return _names(METHODS.keys() - {method}) - _names(METHODS.keys() & {method})


def _names(methods: Iterable[str]) -> set[str]:
    return {each.name for kind in kinds(methods) for each in fields(kind)}


def _check_settings(method: str, kind: type[MethodSettings]) -> None:
    """Refuse settings that would break those of others: on the command line all of them are one flat list."""
    if not (isinstance(kind, type) and issubclass(kind, MethodSettings)):
        raise InvalidArgumentError(f"method={method}: settings={kind!r:.80}; allowed: a class of MethodSettings")
    taken: dict[str, Field[Any]] = {each.name: each for each in fields(Settings)}
    taken |= {each.name: each for other in kinds() for each in fields(other)}
    for each in fields(kind):
        if taken.get(each.name, each) is not each:  # two methods may inherit one of a common class
            raise InvalidArgumentError(f"method={method}: {each.name} is a setting of others; allowed: other names")
        if hasattr(Settings, each.name) or hasattr(MethodSettings, each.name):
            raise InvalidArgumentError(
                f"method={method}: {each.name} is something else of all settings; allowed: other names"
            )
    try:
        kind()
    except Exception as error:  # a field without a default, a default that its own check refuses …
        raise InvalidArgumentError(
            f"method={method}: its settings cannot be made ({first_line(error)}); allowed: a right default for each"
        ) from error
