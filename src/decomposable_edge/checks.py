"""Checks of arguments that several rooms share."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import TypeGuard, TypeVar

from decomposable_edge.errors import InvalidArgumentError

Value = TypeVar("Value")


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether it is a whole number of any library; True and False are not meant as numbers."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether it is a real number of any library."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_ratio(option: str, value: float) -> float:
    """Return a rank ratio Z in (0, 1]."""
    if is_number(value) and 0 < value <= 1:
        return float(value)
    raise InvalidArgumentError.about(option, value, "a number in (0, 1]")


def check_count(option: str, value: object) -> int:
    """Return a whole number from 1."""
    if is_integer(value) and value >= 1:
        return int(value)
    raise InvalidArgumentError.about(option, value, "an int of at least 1")


def only_one(given: Mapping[str, Value], refusal: str) -> tuple[str, Value]:
    """Return the one argument that was given, and its value; `refusal` says what is allowed for none or several."""
    if len(given) != 1:
        raise InvalidArgumentError(refusal)
    return next(iter(given.items()))
