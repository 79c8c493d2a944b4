"""The bases of a layer while a cut is looked for: turned in a metric, dropped, and put in an order of all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decomposable.core.factors import Factors, like_weight
from decomposable.core.forms import matrix_form, to_matrix, to_weight
from decomposable.core.layers import Layer
from decomposable.core.metric import InMetric, Product
from decomposable.core.svd import most_precise
from decomposable.network.allocation import AS_WEIGHTS, Way, shared_out
from decomposable_edge.sizing.order import worth
from decomposable_edge.sizing.ranks import RankSelector

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(eq=False)
class TurnedBases:
    """The bases of one layer: those that are kept, best first, and behind them those that went, in that order."""

    p: Tensor
    q: Tensor
    scores: Numbers  # of those that went; of those that are kept, so far
    kept: int

    @classmethod
    def of(cls, layer: Layer) -> TurnedBases:
        """W = W · 1 or 1 · W, with as few bases as that can have."""
        w_MN = to_matrix(layer.weight.detach(), layer.form)
        w_MN = (w_MN.cpu() if most_precise(w_MN.device) != torch.float64 else w_MN).double()
        rows, columns = w_MN.shape
        one = torch.eye(min(rows, columns), dtype=w_MN.dtype, device=w_MN.device)
        p, q = (w_MN, one) if columns <= rows else (one, w_MN)
        return cls(p.clone(), q.clone(), np.zeros(len(q)), len(q))

    @property
    def is_whole(self) -> bool:
        """Whether no basis went."""
        return self.kept == len(self.q)

    @property
    def what_is_kept(self) -> Product:
        """The product of those that are kept."""
        return Product(self.p[:, : self.kept], self.q[: self.kept])

    def factors(self, layer: Layer) -> Factors:
        """The weights of the two stages."""
        return like_weight(layer, matrix_form(layer.form).stages_of(self.p, self.q, layer.shape))

    def turn(self, bases: InMetric) -> Numbers:
        """Others that span the same, in the place of those that are kept; what leaving out each of them loses."""
        self.p[:, : self.kept], self.q[: self.kept] = bases.p, bases.q
        losses: Numbers = bases.losses.cpu().numpy()
        return losses

    def drop(self, rank: int) -> None:
        """Bases beyond this rank are gone."""
        self.kept = min(self.kept, rank)


def ordered(
    by_weights: RankSelector, bases: Mapping[str, TurnedBases], losses: Mapping[str, Numbers], way: Way
) -> RankSelector:
    """The selector with the order of all bases and, for budgets of parameters, the one per parameter.

    Bases that are kept score their worth, by loss per MAC, or in the way of the weights what the singular value of
    their place says; but more than all that went before.
    """
    gone = [each.scores[each.kept :] for each in bases.values()]
    least = max((each[0] for each in gone if len(each)), default=0.0)
    raw = _as_weights(by_weights, bases, least) if way == AS_WEIGHTS else _by_worth(by_weights, bases, losses, way)
    ascending = np.sort(np.concatenate(list(raw.values())))
    for name, each in raw.items():
        # What is raised to one level keeps its order, by a part in a million.
        place = np.searchsorted(ascending, each, side="right") / max(1, len(ascending))
        bases[name].scores[: bases[name].kept] = np.maximum(each, least) * (1 + 1e-6 * place)
    scores = [bases[cost.name].scores for cost in by_weights.costs]
    per_param = [cost.chain("macs", (1,)) / cost.chain("params", (1,)) for cost in by_weights.costs]
    return replace(
        by_weights,
        scores=tuple(each.copy() for each in scores),
        params_scores=tuple(each * ratio for each, ratio in zip(scores, per_param, strict=True)),
    )


def _by_worth(
    selector: RankSelector, bases: Mapping[str, TurnedBases], losses: Mapping[str, Numbers], exponent: Any
) -> dict[str, Numbers]:
    kept = {name: each[: bases[name].kept] for name, each in shared_out(losses, exponent).items()}
    return {
        cost.name: worth(
            kept[cost.name],
            per_rank=cost.chain("macs", (1,)),
            dense=cost.dense_macs,
            is_whole=bases[cost.name].is_whole,
        )
        for cost in selector.costs
    }


def _as_weights(selector: RankSelector, bases: Mapping[str, TurnedBases], least: float) -> dict[str, Numbers]:
    """The singular values of the layers, as many as bases are kept; raised together to more than what went."""
    kept = {
        cost.name: np.asarray(scores, dtype=np.float64)[: bases[cost.name].kept]
        for cost, scores in zip(selector.costs, selector.scores, strict=True)
    }
    smallest = min((float(each.min()) for each in kept.values() if len(each)), default=0.0)
    factor = least / smallest if 0 < smallest < least else 1.0
    return {name: each * factor for name, each in kept.items()}


@torch.no_grad()
def write_(layers: Sequence[Layer], ranks: Mapping[str, int], bases: Mapping[str, TurnedBases]) -> None:
    """The weights, cut to these ranks."""
    for layer in layers:
        rank, one = ranks[layer.name], bases[layer.name]
        layer.weight.copy_(to_weight(one.p[:, :rank] @ one.q[:rank], layer.shape, layer.form))
