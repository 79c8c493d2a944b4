"""Ways to train a network that has several sizes afterwards; `base.py` says what all of them offer."""

from __future__ import annotations

import difflib
from dataclasses import fields

from decomposable.errors import InvalidArgumentError
from decomposable.methods import decomposable, plain, scratch, slimmable, trp, tucker, us_net, width
from decomposable.methods.base import LineStyle, Material, Method, Sized, Step, Training
from decomposable.methods.registry import BUILT_IN, METHODS, kinds
from decomposable.methods.settings import Settings
from decomposable.methods.values import MethodSettings

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


def register(method: Method) -> None:
    """Have a method trained, resumed, compared and drawn under its name, and its settings known.

    Where trainings run side by side, their processes register it again: its class has to be one of a module.
    """
    if METHODS.get(method.name, method) is not method:
        raise InvalidArgumentError(f"method={method.name}: there is one of this name; allowed: another name")
    taken = {each.name: each for each in fields(Settings)} | {e.name: e for kind in kinds() for e in fields(kind)}
    kind = getattr(method, "settings", None)
    for each in () if kind is None else fields(kind):
        if taken.get(each.name, each) is not each:  # two methods may inherit one of a common class
            raise InvalidArgumentError(
                f"method={method.name}: {each.name} is a setting of others; allowed: other names"
            )
    METHODS[method.name] = method


def find(name: str) -> Method:
    """The method of that name; an unknown one is refused with the nearest."""
    if name not in METHODS:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), METHODS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidArgumentError(f"method={name}; {hint}allowed: {', '.join(METHODS)}")
    return METHODS[name]


for _package in (plain, width, scratch, trp, tucker, slimmable, us_net, decomposable):
    register(_package.METHOD)
BUILT_IN.update(METHODS)
