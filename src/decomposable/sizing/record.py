"""The record of all that choosing a size needs, written and read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from decomposable.fields import Fields, require
from decomposable.sizing.cost import LeftAlone
from decomposable.text import one_line

_MOST_ALIGNMENTS = 1000


def alignments_from(record: Fields) -> tuple[int, ...]:
    """What the ranks of calibrated sizes were rounded to."""
    found = record.integers("alignments")
    is_right = 0 < len(found) <= _MOST_ALIGNMENTS and all(align >= 1 for align in found)
    require(is_right, f"'alignments' of {record.where} is {found!r:.60}, not a list of multiples")
    return tuple(found)


def grids_from(record: Fields) -> tuple[int, ...]:
    """Of which alignments the calibrated sizes are a grid; files of before grids were refined say nothing of it."""
    if not record.has("grids"):
        return ()
    found = tuple(record.integers("grids"))
    require(set(found) <= set(alignments_from(record)), f"'grids' of {record.where} is {found!r:.60}, not calibrated")
    return found


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
