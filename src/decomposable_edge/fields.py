"""Reading JSON that may be wrong in any way: each field is checked as it is read."""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeGuard

MOST = 1 << 62
"""Of a count, so that what is computed from it stays within 64 bits."""

MOST_VALUES = 1_000_000
"""Objects, lists and what they hold, in all, of a text that is read: an empty object is two bytes of it, and 64 in
memory. (A ResNet-50 has 7,000.)"""


class Damaged(ValueError):
    """What a file says is wrong. Whoever reads the file adds its name."""


class Corrupt(Damaged):
    """The bytes of a tensor are not those that were written."""


def parse_json(text: str, what: str = "its description") -> Any:
    """Return what the text stands for; refuse what Python's reader lets pass: a key twice, NaN, half a character.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    decomposable_edge.fields.Damaged: its description is not JSON ('a' is there twice)
    """
    require(values_in(text) <= MOST_VALUES, f"{what} has more than {MOST_VALUES:,} values")
    try:
        value = json.loads(text, object_pairs_hook=_once_each, parse_constant=_finite, parse_float=_finite)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode()  # half a character can neither be stored nor shown
        return value
    except RecursionError as error:
        raise Damaged(f"{what} is not JSON (too many levels)") from error
    except ValueError as error:
        raise Damaged(f"{what} is not JSON ({error})") from error


def values_in(text: str) -> int:
    """Return how many values a text in JSON may hold, without reading it: each has a bracket or a comma before it.

    >>> values_in('{"a": [1, 2, {}]}')
    5
    """
    return sum(map(text.count, ",[{"))


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{key!r:.60} is there twice")
        values[key] = value
    return values


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is not a finite number")
    return number


def require(condition: bool, text: str) -> None:
    """Raise `Damaged` with the text unless the condition holds."""
    if not condition:
        raise Damaged(text)


def are_counts(values: object) -> TypeGuard[list[int]]:
    """Return whether this is a list of counts."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < MOST for value in values)


class Fields:
    """A JSON object; `where` is what messages call it.

    >>> Fields({"rank": 3}, "layer 1").integer("rank")
    3
    >>> Fields({"rank": "3"}, "layer 1").integer("rank")
    Traceback (most recent call last):
    decomposable_edge.fields.Damaged: 'rank' of layer 1 is '3', not a whole number from 0
    """

    def __init__(self, value: Any, where: str) -> None:
        require(isinstance(value, dict), f"{where} is not an object")
        self._values: dict[str, Any] = value
        self.where = where

    def has(self, key: str) -> bool:
        """Return whether the field is there."""
        return key in self._values

    def get(self, key: str) -> Any:
        """Return the field, which has to be there, unchecked."""
        require(key in self._values, f"'{key}' of {self.where} is missing")
        return self._values[key]

    def _checked(self, key: str, is_right: bool, kind: str) -> Any:
        value = self.get(key)
        require(is_right, f"'{key}' of {self.where} is {value!r:.60}, not {kind}")
        return value

    def text(self, key: str) -> str:
        """Return a string."""
        return self._checked(key, isinstance(self.get(key), str), "text")

    def flag(self, key: str) -> bool:
        """Return true or false."""
        return self._checked(key, isinstance(self.get(key), bool), "true or false")

    def integer(self, key: str, least: int = 0, most: int = MOST) -> int:
        """Return a whole number within these limits."""
        value = self.get(key)
        return self._checked(key, type(value) is int and least <= value <= most, f"a whole number from {least}")

    def integers(self, key: str) -> list[int]:
        """Return a list of counts."""
        return self._checked(key, are_counts(self.get(key)), "a list of counts")

    def texts(self, key: str) -> list[str]:
        """Return a list of strings."""
        values = self.get(key)
        is_right = isinstance(values, list) and all(isinstance(v, str) for v in values)
        return self._checked(key, is_right, "a list of text")

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object of any content."""
        return self._checked(key, isinstance(self.get(key), dict), "an object")

    def texts_by_name(self, key: str) -> dict[str, str]:
        """Return an object whose fields are strings."""
        return self._checked(key, all(isinstance(v, str) for v in self.mapping(key).values()), "text by name")

    def records(self, key: str) -> dict[str, Fields]:
        """Return an object of objects."""
        return {name: Fields(value, f"'{name}'") for name, value in self.mapping(key).items()}

    def record_list(self, key: str) -> list[Fields]:
        """Return a list of objects."""
        values = self._checked(key, isinstance(self.get(key), list), "a list")
        return [Fields(value, f"{key}[{i}]") for i, value in enumerate(values)]
