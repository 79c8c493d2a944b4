"""Reading JSON that may be wrong in any way: each field is checked as it is read."""

from __future__ import annotations

from typing import Any

MOST = 1 << 62
"""Of a count, so that what is computed from it stays within 64 bits."""


class Damaged(ValueError):
    """What a file says is wrong. Whoever reads the file adds its name."""


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
