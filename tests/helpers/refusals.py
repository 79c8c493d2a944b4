"""What tests ask of an error: its attributes. The message may be worded better at any time."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import ANY

import pytest

from decomposable_edge.errors import DecomposableError, InvalidArgumentError


@contextmanager
def refused(
    option: Any = ANY,
    came: Any = ANY,
    allowed: Any = ANY,
    *,
    kind: type[DecomposableError] = InvalidArgumentError,
    **others: Any,
) -> Iterator[pytest.ExceptionInfo[DecomposableError]]:
    """Expect an error with these attributes, whose message is one printable line that says what is allowed."""
    with pytest.raises(kind) as caught:
        yield caught
    error, text = caught.value, str(caught.value)
    wanted = {"option": option, "came": came, "allowed": allowed, **others}
    assert {name: getattr(error, name) for name in wanted} == wanted, text
    assert text.isprintable()
    if option is not ANY and option is not None:
        assert option in text
    for said in (error.allowed, error.layer, getattr(error, "reason", None), getattr(error, "blocking", None)):
        assert str(said or "") in text


class Saying:
    """Equal to what says this, a regular expression: where words are all there is, as in why a file is refused."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __eq__(self, other: object) -> bool:
        return re.search(self.pattern, str(other)) is not None

    def __hash__(self) -> int:
        return hash(self.pattern)

    def __repr__(self) -> str:
        return f"Saying({self.pattern!r})"
