"""Values of settings: of the type that their field has, checked where they are made, and read from text."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from decomposable_edge.errors import SettingError

MOST = 2**31 - 1
"""Of a whole number in the settings: epochs, images and seeds are far below."""

Check = tuple[tuple[str, ...], str, Callable[[Any], bool]]
"""Names of settings, what is allowed, in words, and whether a value is."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Settings whose values become of the type that their field has, or are refused with what is allowed."""

    checks: ClassVar[tuple[Check, ...]] = ()

    def __post_init__(self) -> None:
        settings: type = type(self)
        for field in fields(self):
            kind, value = _hints(settings)[field.name], getattr(self, field.name)
            try:
                object.__setattr__(self, field.name, _convert(kind, value))
            except (ValueError, TypeError, KeyError, OverflowError):
                raise SettingError(field.name, as_text(value), _describe(kind)) from None
        for names, allowed, is_right in self.checks:
            for name in names:
                if not is_right(getattr(self, name)):
                    raise SettingError(name, as_text(getattr(self, name)), allowed)


@dataclass(frozen=True, kw_only=True)
class MethodSettings(Checked):
    """What a single method depends on besides the shared `Settings`; a subclass beside each method has the fields.

    On the outside they are settings like all others: ``Settings(trp_energy=0.99)``, ``--set trp_energy=0.99``.
    Names that begin with ``compare_`` or ``tuning_`` say which trainings a comparison has, and nothing of a single one.
    """

    swept: ClassVar[Mapping[str, str]] = {}
    """Settings that a comparison has a value of its own for in each training, and the one that chooses these."""


def is_one_of(*allowed: str) -> Callable[[Any], bool]:
    """Return the check of a setting that is one of some words."""
    return lambda value: value in allowed


class Text(str):
    """A value as it was typed, to be read as what its setting is."""

    __slots__ = ()


_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_hints = cache(get_type_hints)  # it reads them from text every time


def _convert(kind: Any, value: Any) -> Any:
    if get_origin(kind) is tuple:
        arguments = get_args(kind)
        if isinstance(value, Text):
            value = [Text(part) for part in value.strip("()[]").split(",") if part.strip()]
        elif isinstance(value, str) or not isinstance(value, Iterable):
            raise TypeError
        entries = tuple(_convert(arguments[0], entry) for entry in value)
        if Ellipsis not in arguments and len(entries) != len(arguments):
            raise ValueError
        return entries
    if get_origin(kind) in (Union, types.UnionType):
        if value is None or (isinstance(value, Text) and value.lower() == "none"):
            return None
        return _convert(next(k for k in get_args(kind) if k is not type(None)), value)
    if isinstance(value, Text):
        if kind is bool:
            return _BOOLEANS[value.lower()]
        return _within(kind(str(value)))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise TypeError
    return _within(value)


def _within(value: Any) -> Any:
    """Return the value; refuse a whole number that nothing here can count to."""
    if isinstance(value, int) and abs(value) > MOST:
        raise ValueError
    return value


def _describe(kind: Any) -> str:
    if get_origin(kind) is tuple:
        arguments = get_args(kind)
        one = {int: "int", float: "number", str: "text"}.get(arguments[0], "value")
        return f"{one}s, separated by commas" if Ellipsis in arguments else f"{len(arguments)} {one}s, as in 0.01,0.5"
    return {int: f"an int of at most {MOST:,}", float: "a number", bool: "true or false", str: "a text"}.get(
        kind, f"a {getattr(kind, '__name__', kind)}"
    )


def as_text(value: Any) -> str:
    """Return a value as it is shown; Python writes no digits of a very long number."""
    try:
        text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    except ValueError:
        text = "a number of too many digits"
    return text if len(text) <= 200 else f"{text[:199]}…"
