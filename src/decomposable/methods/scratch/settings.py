"""The settings of a factored network that is trained from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from decomposable.methods.values import Check, MethodSettings


@dataclass(frozen=True, kw_only=True)
class ScratchSettings(MethodSettings):
    """Its ranks."""

    ranks: tuple[int, ...] = ()  # of the layers in order

    compare_ranks: tuple[float, ...] = (0.25,)  # the sizes whose ranks Decomposable-Net gives

    swept: ClassVar[Mapping[str, str]] = {"ranks": "compare_ranks"}
    checks: ClassVar[tuple[Check, ...]] = (
        (("ranks",), "ints of at least 1", lambda v: all(r >= 1 for r in v)),
        (("compare_ranks",), "parts of the MACs, as in 0.25,0.5", lambda v: v and all(0 < s <= 1 for s in v)),
    )
