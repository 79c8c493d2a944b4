"""Reading JSON that may be wrong in any way: each field is checked as it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from decomposable.cost import LeftAlone

MOST = 1 << 62
"""Of a count, so that what is computed from it stays within 64 bits."""

_MOST_ALIGNMENTS = 1000


class Damaged(ValueError):
    """What a file says is wrong. Whoever reads the file adds its name."""


class Corrupt(Damaged):
    """The bytes of a tensor are not those that were written."""


def parse_json(text: str) -> Any:
    """What the text stands for; refuse what Python's reader lets pass: a key twice, NaN, infinity, half a character.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    decomposable.storage.fields.Damaged: its description is not JSON ('a' is there twice)
    """
    try:
        value = json.loads(text, object_pairs_hook=_once_each, parse_constant=_finite, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()  # half a character can neither be stored nor shown
        return value
    except RecursionError as error:
        raise Damaged("its description is not JSON (too many levels)") from error
    except ValueError as error:
        raise Damaged(f"its description is not JSON ({error})") from error


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


def one_line(text: object, most: int = 400) -> str:
    r"""Text that may hold what a file says, fit to be shown: no line breaks, nothing a terminal would obey.

    >>> print(one_line("layer 'a\nb' is damaged"))
    layer 'a\nb' is damaged
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text)[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def require(condition: bool, text: str) -> None:
    """Raise `Damaged` with the text unless the condition holds."""
    if not condition:
        raise Damaged(text)


class Fields:
    """A JSON object; `where` is what messages call it.

    >>> Fields({"rank": 3}, "layer 1").integer("rank")
    3
    >>> Fields({"rank": "3"}, "layer 1").integer("rank")
    Traceback (most recent call last):
    decomposable.storage.fields.Damaged: 'rank' of layer 1 is '3', not a whole number from 0
    """

    def __init__(self, value: object, where: str) -> None:
        require(isinstance(value, dict), f"{where} is not an object")
        self._values: dict[str, Any] = value  # type: ignore[assignment]
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the field is there."""
        return key in self._values

    def get(self, key: str) -> Any:
        """The field, which has to be there, unchecked."""
        require(key in self._values, f"'{key}' of {self.where} is missing")
        return self._values[key]

    def _checked(self, key: str, is_right: bool, kind: str) -> Any:
        value = self.get(key)
        require(is_right, f"'{key}' of {self.where} is {value!r:.60}, not {kind}")
        return value

    def text(self, key: str) -> str:
        """A string."""
        return self._checked(key, isinstance(self.get(key), str), "text")

    def flag(self, key: str) -> bool:
        """True or false."""
        return self._checked(key, isinstance(self.get(key), bool), "true or false")

    def integer(self, key: str, least: int = 0, most: int = MOST) -> int:
        """A whole number within these limits."""
        value = self.get(key)
        return self._checked(key, type(value) is int and least <= value <= most, f"a whole number from {least}")

    def integers(self, key: str) -> list[int]:
        """A list of counts."""
        values = self.get(key)
        is_right = isinstance(values, list) and all(type(v) is int and 0 <= v <= MOST for v in values)
        return self._checked(key, is_right, "a list of counts")

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        values = self.get(key)
        return self._checked(
            key, isinstance(values, list) and all(isinstance(v, str) for v in values), "a list of text"
        )

    def mapping(self, key: str) -> dict[str, Any]:
        """An object of any content."""
        return self._checked(key, isinstance(self.get(key), dict), "an object")

    def texts_by_name(self, key: str) -> dict[str, str]:
        """An object whose fields are strings."""
        self._checked(key, all(isinstance(v, str) for v in self.mapping(key).values()), "text by name")
        return self.mapping(key)

    def records(self, key: str) -> dict[str, Fields]:
        """An object of objects."""
        return {name: Fields(value, f"'{name}'") for name, value in self.mapping(key).items()}

    def record_list(self, key: str) -> list[Fields]:
        """A list of objects."""
        values = self._checked(key, isinstance(self.get(key), list), "a list")
        return [Fields(value, f"{key}[{i}]") for i, value in enumerate(values)]


def alignments_from(record: Fields) -> tuple[int, ...]:
    """What the ranks of calibrated sizes were rounded to."""
    found = record.integers("alignments")
    is_right = 0 < len(found) <= _MOST_ALIGNMENTS and all(align >= 1 for align in found)
    require(is_right, f"'alignments' of {record.where} is {found!r:.60}, not a list of multiples")
    return tuple(found)


def left_alone_from(top: Fields) -> tuple[LeftAlone, ...]:
    """What the largest parts are that no size makes smaller; files of older versions do not say."""
    records = top.record_list("left_alone") if top.has("left_alone") else []
    return tuple(
        LeftAlone(name=one_line(r.text("name"), 200), macs=r.integer("macs"), params=r.integer("params"))
        for r in records
    )


def left_alone_records(parts: Iterable[LeftAlone]) -> list[dict[str, Any]]:
    """The same to be stored."""
    return [{"name": part.name, "macs": part.macs, "params": part.params} for part in parts]
