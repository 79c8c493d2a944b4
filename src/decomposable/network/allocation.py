"""How a cut is shared out among the layers: the losses of different layers, made comparable by a short search.

The loss of a layer's bases is told by a model that takes every layer by itself (`core/metric.py`). For large cuts it
misjudges layers as a whole: what is lost in one changes what the others see. So a layer's losses are divided by a power
of their own sum,

    loss_k / (Σ_k loss_k)^e      e = 0: as they are      e = 1: relative to what the layer has,

and beside these ways of sharing there is that of the singular values: every layer keeps as many bases as its singular
values say, whichever these bases are. The way that is taken is the one of a few, reached by steps up or down, whose
network of the wanted size is nearest to the full one, on images that the losses were not measured with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
AS_WEIGHTS = "weights"
"""The way of the singular values."""

Way = float | str
Numbers = NDArray[np.float64]


def shared_out(losses: Mapping[str, Numbers], exponent: float) -> dict[str, Numbers]:
    """The losses of every layer's bases, divided by this power of their sum.

    >>> shared_out({"fc": np.array([3.0, 1.0])}, 0.5)["fc"].tolist()
    [1.5, 0.5]
    """
    return {name: each / max(each.sum(), np.finfo(np.float64).tiny) ** exponent for name, each in losses.items()}


def best_way(distance: Callable[[Way], float], start: Way) -> Way:
    """The way of the smallest distance: that of the singular values, or the exponent that is found uphill and downhill
    from `start` as long as the distance falls.

    >>> best_way(lambda way: 9.0 if way == AS_WEIGHTS else abs(way - 0.6), 0.0)
    0.5
    """
    exponent = best_exponent(distance, start if isinstance(start, float) else 0.25)
    return AS_WEIGHTS if distance(AS_WEIGHTS) < distance(exponent) else exponent


def best_exponent(distance: Callable[[float], float], start: float) -> float:
    """The exponent of the smallest distance, uphill and downhill from `start` as long as it falls.

    >>> best_exponent(lambda e: abs(e - 0.6), 0.0)
    0.5
    """
    known: dict[int, float] = {}

    def of(index: int) -> float:
        if not 0 <= index < len(EXPONENTS):
            return np.inf
        if index not in known:
            known[index] = distance(EXPONENTS[index])
        return known[index]

    best = EXPONENTS.index(start)
    for step in (1, -1):
        while of(best + step) < of(best):
            best += step
    return EXPONENTS[best]
