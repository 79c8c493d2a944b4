"""Ways to train a network that has several sizes afterwards; `base.py` says what all of them offer."""

from __future__ import annotations

import difflib
import re
from dataclasses import fields

from decomposable.training.methods import decomposable, elastic, plain, scratch, slimmable, trp, tucker, us_net, width
from decomposable.training.methods.base import LineStyle, Material, Method, Sized, Step, Training
from decomposable.training.methods.registry import BUILT_IN, METHODS, kinds
from decomposable.recipes.settings import Settings
from decomposable.recipes.values import MethodSettings
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.text import first_line

__all__ = [
    "METHODS",
    "LineStyle",
    "Material",
    "Method",
    "MethodSettings",
    "Settings",
    "Sized",
    "Step",
    "Training",
    "find",
    "register",
]


_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def register(method: Method) -> None:
    """Have a method trained, resumed, compared and drawn under its name, and its settings known.

    Where trainings run side by side, their processes register it again: its class has to be one of a module.
    """
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


def _check_settings(method: str, kind: type[MethodSettings]) -> None:
    """Refuse settings that would break those of everybody: all of them are made and read as one flat list."""
    if not (isinstance(kind, type) and issubclass(kind, MethodSettings)):
        raise InvalidArgumentError(f"method={method}: settings={kind!r:.80}; allowed: a class of MethodSettings")
    taken = {each.name: each for each in fields(Settings)} | {e.name: e for kind in kinds() for e in fields(kind)}
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


def find(name: str) -> Method:
    """The method of that name; an unknown one is refused with the nearest."""
    if name not in METHODS:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), METHODS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidArgumentError(f"method={name}; {hint}allowed: {', '.join(METHODS)}")
    return METHODS[name]


for _package in (plain, width, scratch, trp, tucker, slimmable, us_net, decomposable, elastic):
    register(_package.METHOD)
BUILT_IN.update(METHODS)
