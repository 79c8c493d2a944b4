"""What the maker of a network noted in its file (`info`): anything that JSON holds, so that each value is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def measured_rows(info: object) -> Iterator[tuple[Mapping[str, Any], float]]:
    """The sizes of which an accuracy in percent is noted, each with it; what is none is passed over.

    >>> [accuracy for _, accuracy in measured_rows({"sizes": [{"size": 1, "accuracy": 91.5}, {"accuracy": "x"}, 3]})]
    [91.5]
    """
    rows = info.get("sizes") if isinstance(info, Mapping) else None
    for row in rows if isinstance(rows, list) else ():
        accuracy = row.get("accuracy") if isinstance(row, Mapping) else None
        if is_between(accuracy, 0, 100):
            yield row, float(accuracy)  # type: ignore[arg-type]


def measured_sizes(info: object) -> dict[float, float]:
    """The accuracies by size, a part of the original, the largest size first."""
    found = {
        float(row["size"]): a for row, a in measured_rows(info) if is_between(row.get("size"), 0, 1) and row["size"]
    }
    return dict(sorted(found.items(), reverse=True))


def recipe_in(info: object) -> str | None:
    """The name of the recipe that a network is said to be trained with."""
    name = info.get("recipe") if isinstance(info, Mapping) else None
    return name if isinstance(name, str) else None


def is_between(value: object, low: float, high: float) -> bool:
    """Whether a value is a number within these limits; it may be of any type, and of any size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
