"""What a basis is worth: the loss that its going would cost, per MAC or parameter that its going would save."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def worth(losses: Numbers, *, per_rank: int, dense: int, is_whole: bool = True) -> Numbers:
    """A layer's bases scored by loss per cost, never rising, so that a prefix of all layers' bases is a good size.

    `losses` is what leaving each basis out loses, best basis first. A layer at rank r costs r · `per_rank`, or `dense`
    where that is less, and whatever it costs densely it loses nothing, because it is the layer itself. Over all layers
    the best sizes lie where the slopes of loss over cost are equal, and only on the lower convex hull of the points
    (cost, loss) of a layer. So the score of a basis is the slope of the hull above it: inside the hull bases go
    together, and the first step, from dense to two factors that are cheaper, is one such step. A layer of which bases
    are gone already, one that is not `is_whole`, has two factors at all ranks that are left.

    >>> worth(np.array([8.0, 4.0, 2.0, 1.0]), per_rank=1, dense=4).tolist()
    [8.0, 4.0, 2.0, 1.0]
    >>> worth(np.array([8.0, 4.0, 2.0, 1.0]), per_rank=2, dense=4).tolist()  # rank 2 costs as much as all
    [4.0, 3.5, 3.5, 3.5]
    """
    count = len(losses)
    lost = np.append(np.cumsum(losses[::-1])[::-1], 0.0)  # at rank 0, 1, …, K
    cost = np.minimum(np.arange(count + 1) * float(per_rank), dense)
    cost[count] = dense if is_whole else cost[count]
    cheaper = [rank for rank in range(count) if cost[rank] < cost[count]]
    hull: list[int] = []
    for rank in [*cheaper, count]:
        while len(hull) > 1 and _slope(lost, cost, hull[-2], hull[-1]) <= _slope(lost, cost, hull[-1], rank):
            hull.pop()
        hull.append(rank)
    scores = np.zeros(count)
    for low, high in pairwise(hull):
        scores[low:high] = _slope(lost, cost, low, high)
    return scores


def _slope(lost: Numbers, cost: Numbers, low: int, high: int) -> float:
    """What is lost per cost from one rank down to another."""
    return float((lost[low] - lost[high]) / max(cost[high] - cost[low], 1.0))
