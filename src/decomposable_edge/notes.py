"""What the maker of a network noted in its file (`info`): anything that JSON holds, so that each value is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from decomposable_edge.checks import is_number


def measured_rows(info: object) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Give the sizes with a noted accuracy in percent, each with it; anything else is passed over.

    >>> [accuracy for _, accuracy in measured_rows({"sizes": [{"size": 1, "accuracy": 91.5}, {"accuracy": "x"}, 3]})]
    [91.5]
    """
    rows = info.get("sizes") if isinstance(info, Mapping) else None
    for row in rows if isinstance(rows, list) else ():
        accuracy = row.get("accuracy") if isinstance(row, Mapping) else None
        if is_number(accuracy) and 0 <= accuracy <= 100:
            yield row, float(accuracy)


def measured_sizes(info: object) -> dict[float, float]:
    """Return the accuracies by size, a part of the original, the largest size first."""
    rows = [(row.get("size"), accuracy) for row, accuracy in measured_rows(info)]
    found = {float(size): accuracy for size, accuracy in rows if is_number(size) and 0 < size <= 1}
    return dict(sorted(found.items(), reverse=True))


def recipe_in(info: object) -> str | None:
    """Return the name of the recipe that a network is said to be trained with."""
    name = info.get("recipe") if isinstance(info, Mapping) else None
    return name if isinstance(name, str) else None
