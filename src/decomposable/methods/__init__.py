"""Ways to train a network that has several sizes afterwards; `base.py` says what all of them offer."""

from __future__ import annotations

import difflib

from decomposable.errors import InvalidArgumentError
from decomposable.methods import decomposable, plain, scratch, slimmable, trp, tucker, us_net, width
from decomposable.methods.base import Material, Method, Sized, Step, Training

__all__ = ["METHODS", "Material", "Method", "Sized", "Step", "Training", "find"]

METHODS: dict[str, Method] = {
    package.METHOD.name: package.METHOD
    for package in (plain, width, scratch, trp, tucker, slimmable, us_net, decomposable)
}


def find(name: str) -> Method:
    """The method of that name; an unknown one is refused with the nearest."""
    if name not in METHODS:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), METHODS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidArgumentError(f"method={name}; {hint}allowed: {', '.join(METHODS)}")
    return METHODS[name]
