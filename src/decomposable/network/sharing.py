"""How a cut is shared out among the layers: their bases, put in one order.

A layer's losses come from a model that takes every layer by itself (`core/metric.py`). For large cuts it misjudges
whole layers: what one layer loses changes what the others see. So the losses are divided by a power of their own sum,

    loss_k / (Σ_k loss_k)^e      e = 0: as they are      e = 1: relative to what the layer has.

Each exponent is a way to share out a cut. One more way is that of the singular values: every layer keeps as many bases
as its singular values say, whichever bases these are. A short search takes the way whose network of the wanted size is
nearest to the full one, on images that the losses were not measured with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decomposable.core.factors import Factors, like_weight
from decomposable.core.forms import matrix_form, to_matrix, to_weight
from decomposable.core.layers import Layer
from decomposable.core.metric import InMetric, Product
from decomposable.core.svd import most_precise
from decomposable_edge.sizing.order import worth
from decomposable_edge.sizing.ranks import RankSelector

EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
AS_WEIGHTS = "weights"
"""The way of the singular values."""

Way = float | str
Numbers = NDArray[np.float64]


def best_way(distance: Callable[[Way], float], start: Way) -> Way:
    """Return the way of the smallest distance: that of the singular values, or an exponent.

    The exponent is searched for from `start`, up and down, as long as the distance falls.

    >>> best_way(lambda way: 9.0 if way == AS_WEIGHTS else abs(way - 0.6), 0.0)
    0.5
    """
    distance = cache(distance)
    best = EXPONENTS.index(start if isinstance(start, float) else 0.25)
    for step in (1, -1):
        while 0 <= best + step < len(EXPONENTS) and distance(EXPONENTS[best + step]) < distance(EXPONENTS[best]):
            best += step
    return AS_WEIGHTS if distance(AS_WEIGHTS) < distance(EXPONENTS[best]) else EXPONENTS[best]


@dataclass(eq=False)
class TurnedBases:
    """The bases of one layer: those that are kept, best first, and behind them those that were dropped.

    Those that were dropped have their final scores, those that are kept the scores so far. `losses` has what leaving
    out each of those that are kept loses.
    """

    p: Tensor
    q: Tensor
    kept: int
    scores: Numbers = field(default_factory=lambda: np.zeros(0))
    losses: Numbers = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, layer: Layer) -> TurnedBases:
        """Return W = W · 1 or 1 · W, with as few bases as possible."""
        w_MN = to_matrix(layer.weight.detach(), layer.form)
        w_MN = (w_MN.cpu() if most_precise(w_MN.device) != torch.float64 else w_MN).double()
        rows, columns = w_MN.shape
        one = torch.eye(min(rows, columns), dtype=w_MN.dtype, device=w_MN.device)
        p, q = (w_MN, one) if columns <= rows else (one, w_MN)
        return cls(p.clone(), q.clone(), len(q), np.zeros(len(q)))

    @property
    def what_is_kept(self) -> Product:
        """Return the product of the bases that are kept."""
        return Product(self.p[:, : self.kept], self.q[: self.kept])

    def factors(self, layer: Layer) -> Factors:
        """Return the weights of the two stages."""
        return like_weight(layer, matrix_form(layer.form).stages_of(self.p, self.q, layer.shape))

    def turn(self, bases: InMetric) -> None:
        """Replace the bases that are kept by others that span the same."""
        self.p[:, : self.kept], self.q[: self.kept] = bases.p, bases.q
        self.losses = bases.losses.cpu().numpy()

    def shared(self, exponent: float) -> Numbers:
        """Return the losses, divided by this power of their sum."""
        return self.losses[: self.kept] / max(self.losses.sum(), np.finfo(np.float64).tiny) ** exponent


def ordered(by_weights: RankSelector, bases: Mapping[str, TurnedBases], way: Way) -> RankSelector:
    """Return the selector with all bases in order, by their worth per MAC and, for such budgets, per parameter.

    Bases that are kept score more than all that were dropped before.
    """
    dropped = [each.scores[each.kept] for each in bases.values() if each.kept < len(each.scores)]
    least = max(dropped, default=0.0)
    raw = _by_weights(by_weights, bases, least) if isinstance(way, str) else _by_worth(by_weights, bases, way)
    ascending = np.sort(np.concatenate(list(raw.values())))
    for name, each in raw.items():
        # Scores that are raised to one level keep their order, by a part in a million.
        place = np.searchsorted(ascending, each, side="right") / max(1, len(ascending))
        bases[name].scores[: bases[name].kept] = np.maximum(each, least) * (1 + 1e-6 * place)
    scores = [bases[cost.name].scores for cost in by_weights.costs]
    per_param = [cost.chain("macs", (1,)) / cost.chain("params", (1,)) for cost in by_weights.costs]
    return replace(
        by_weights,
        scores=tuple(each.copy() for each in scores),
        params_scores=tuple(each * ratio for each, ratio in zip(scores, per_param, strict=True)),
    )


def _by_worth(selector: RankSelector, bases: Mapping[str, TurnedBases], exponent: float) -> dict[str, Numbers]:
    """Return the losses per MAC."""
    return {
        cost.name: worth(
            bases[cost.name].shared(exponent),
            per_rank=cost.chain("macs", (1,)),
            dense=cost.dense_macs,
            is_whole=bases[cost.name].kept == len(bases[cost.name].q),
        )
        for cost in selector.costs
    }


def _by_weights(selector: RankSelector, bases: Mapping[str, TurnedBases], least: float) -> dict[str, Numbers]:
    """Return the singular value of every basis' place; all are raised together, above what was dropped."""
    kept = {
        cost.name: np.asarray(scores, dtype=np.float64)[: bases[cost.name].kept]
        for cost, scores in zip(selector.costs, selector.scores, strict=True)
    }
    smallest = min((float(each.min()) for each in kept.values() if len(each)), default=0.0)
    factor = least / smallest if 0 < smallest < least else 1.0
    return {name: each * factor for name, each in kept.items()}


@torch.no_grad()
def write_(layers: Sequence[Layer], ranks: Mapping[str, int], bases: Mapping[str, TurnedBases]) -> None:
    """Write the weights, cut to these ranks."""
    for layer in layers:
        rank, one = ranks[layer.name], bases[layer.name]
        layer.weight.copy_(to_weight(one.p[:, :rank] @ one.q[:rank], layer.shape, layer.form))
