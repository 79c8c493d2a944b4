"""One way down from the full network to the smallest: bases that data give the layers, and their order.

A metric tells what a layer's cut loses while all else stays as it is (`core/metric.py`). That is right for a small cut,
and too optimistic for a large one, where what is lost upstream changes what comes downstream. So it is measured again
on the way down:

    measure the network ─▶ bases and losses in that metric ─▶ order by loss per MAC ─▶ cut to the next size ─▶ measure …

How much the losses of one layer count beside those of another is chosen for every such step (`allocation.py`). Bases
that a cut has dropped stay behind all others, and those that it kept are turned among themselves: a size contains every
smaller one, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.factors import Factors
from decomposable.core.forms import to_factors, to_weight
from decomposable.core.layers import Layer
from decomposable.core.metric import InMetric, Product, decompose_in_metric, losses_in_metric
from decomposable.core.moments import Moments, NoGradientError, samples_in, second_moments
from decomposable.core.shrinkage import of_weights, shrunk
from decomposable.core.tracing import Forward
from decomposable.network.allocation import Way, best_way
from decomposable.network.calibration.statistics import averaged, tracked_batch_norms
from decomposable.network.goals import OUTPUT, Goal
from decomposable.network.judging import Judge, JudgedSize
from decomposable.network.samples import Samples
from decomposable.network.turned import Numbers, TurnedBases, ordered, write_
from decomposable.network.work import MEASURED_AGAIN_WITH, Work, goal_sizes, on_the_way
from decomposable_edge.sizing.chain import ranks_of
from decomposable_edge.sizing.ranks import RankSelector

Put = Callable[[Way], nn.Module]
"""The network of the wanted size, with the cut shared out in a way."""

Choose = Callable[[float, Put], Way]
"""``choose(size, put)``: the way in which a cut to a size is shared out among the layers."""


@dataclass(frozen=True, eq=False)
class Found:
    """Where a way down ended: the bases of all layers, their order, the ways in which cuts were shared out, and the
    layers whose bases are those of their weights.
    """

    bases: Mapping[str, TurnedBases]
    selector: RankSelector
    ways: tuple[Way, ...]
    by_weights: frozenset[str]


def searched(judge: Judge, work: Work) -> Choose:
    """Choose the way whose network is nearest to the full one, from the last one on."""
    last: list[Way] = [0.0]

    def choose(size: float, put: Put) -> Way:
        known: dict[Way, float] = {}
        with work.sharing(size) as tried:

            def distance(way: Way) -> float:
                if way not in known:
                    known[way] = judge.distance(put(way))
                    tried()
                return known[way]

            last[0] = best_way(distance, last[0])
        return last[0]

    return choose


def replayed(ways: Iterable[Way]) -> Choose:
    """Choose what was chosen before, one after the other."""
    left = iter(ways)
    return lambda size, put: next(left)


@dataclass(eq=False)
class Descent:
    """What goes down: the network, whose weights are written to, and how it is run and measured.

    `by_weights` has the order of the singular values, `factors` their bases; `centred` layers are followed by batch
    normalisation.
    """

    base: nn.Module
    layers: Sequence[Layer]
    by_weights: RankSelector
    factors: Mapping[str, Factors]
    forward: Forward
    goal: Goal
    centred: frozenset[str]
    work: Work
    _originals: Mapping[str, Tensor] = field(init=False)
    _is_blind: bool = field(default=False, init=False)  # whether no gradient can be had

    def __post_init__(self) -> None:
        self._originals = {layer.name: layer.weight.detach().clone() for layer in self.layers}

    def run(
        self,
        samples: Samples,
        choose: Choose,
        *,
        by_weights: frozenset[str] = frozenset(),
        judged_by: Sequence[Any] = (),
    ) -> Found:
        """Go down. `judged_by` are batches that say which layers are better cut by their weights, besides those of
        which that is known.
        """
        bases = {layer.name: TurnedBases.of(layer) for layer in self.layers}
        goals, selector, ways = goal_sizes(self.by_weights), self.by_weights, []
        for place, goal in enumerate((*goals, None)):
            judges = judged_by if place == 0 else ()
            losses, by_weights = self._measured(bases, samples, by_weights, judges)
            for size in on_the_way(goal, goals, self.by_weights.smallest_size):
                ways.append(choose(size, self._put(bases, losses, size)))
                selector = ordered(self.by_weights, bases, losses, ways[-1])
                # Unrounded: it is the order of the bases that is looked for.
                for name, rank in selector.of_size(size, "macs", align=1).ranks.items() if goal is not None else ():
                    bases[name].drop(*ranks_of(rank))
            if goal is not None:
                samples = samples.first(MEASURED_AGAIN_WITH)
                self._cut_to_(bases, samples, goal)
        self.at_full_size_()
        return Found(bases, selector, tuple(ways), by_weights)

    def _cut_to_(self, bases: Mapping[str, TurnedBases], samples: Samples, goal: float) -> None:
        """Write the network of this size, with statistics of its own."""
        write_(self.layers, {name: one.kept for name, one in bases.items()}, bases)
        if tracked_batch_norms(self.base):
            with self.work.averaging(samples, goal) as seen:  # which leaves them in the network
                averaged([lambda: self.base], self.forward, samples.measure, lambda *_: seen(), asker="decompose")

    def compared(self, found: Found, judge: Judge, size: float) -> JudgedSize:
        """The distances of two networks of a size to the full one: as it was found, and by singular values."""
        with self.work.comparing(size):
            write_(self.layers, _one_each(found.selector.of_size(size, "macs").ranks), found.bases)
            by_data = judge.distance(self.base)
            self._write_by_weights_(self.by_weights.of_size(size, "macs").ranks)
            by_weights = judge.distance(self.base)
            self.at_full_size_()
            return JudgedSize(size=size, by_data=by_data, by_weights=by_weights)

    @torch.no_grad()
    def at_full_size_(self) -> nn.Module:
        """The network with its own weights again."""
        for layer in self.layers:
            layer.weight.copy_(self._originals[layer.name])
        return self.base

    @torch.no_grad()
    def _write_by_weights_(self, ranks: Mapping[str, Any]) -> None:
        for layer in self.layers:
            first, second = self.factors[layer.name]
            p, q = to_factors(first, second, layer.form)
            rank = _one_each(ranks)[layer.name]
            layer.weight.copy_(to_weight(p[:, :rank] @ q[:rank], layer.shape, layer.form))

    def _put(self, bases: Mapping[str, TurnedBases], losses: Mapping[str, Numbers], size: float) -> Put:
        def put(way: Way) -> nn.Module:
            selector = ordered(self.by_weights, bases, losses, way)
            ranks = _one_each(selector.of_size(size, "macs", align=1).ranks)
            write_(self.layers, {name: min(rank, bases[name].kept) for name, rank in ranks.items()}, bases)
            return self.base

        return put

    def _measured(
        self,
        bases: Mapping[str, TurnedBases],
        samples: Samples,
        by_weights: frozenset[str],
        judged_by: Sequence[Any],
    ) -> tuple[dict[str, Numbers], frozenset[str]]:
        """Turn every layer's bases into those of its metric; what leaving out each of them loses, and which layers are
        cut by their weights.
        """
        try:
            return self._turned(bases, samples, by_weights, judged_by)
        except NoGradientError:
            if self.goal is not OUTPUT:
                raise
            self._is_blind = True  # then every layer's own output counts, and the network's in sharing a cut out
        return self._turned(bases, samples, by_weights, judged_by)

    def _turned(
        self,
        bases: Mapping[str, TurnedBases],
        samples: Samples,
        by_weights: frozenset[str],
        judged_by: Sequence[Any],
    ) -> tuple[dict[str, Numbers], frozenset[str]]:
        losses: dict[str, Numbers] = {}
        with self.work.measuring(samples) as seen:
            for moments in self._moments(self.layers, samples.measure, seen):
                products = {name: bases[name].what_is_kept for name in moments}
                found = self._in_metric(products, moments, by_weights)
                if judged_by:
                    by_weights |= self._worse(found, products, moments, judged_by)
                    found |= self._in_metric({n: products[n] for n in moments if n in by_weights}, moments, by_weights)
                losses |= {name: bases[name].turn(each) for name, each in found.items()}
                del moments, products, found  # before the next pass needs the memory
        return losses, by_weights

    def _moments(
        self, layers: Sequence[Layer], batches: Iterable[Any], seen: Callable[[], None]
    ) -> Iterable[dict[str, Moments]]:
        loss = None if self._is_blind else self.goal.loss
        return second_moments(self.base, layers, batches, self.forward, loss, centred=self.centred, seen=seen)

    @staticmethod
    def _in_metric(
        products: Mapping[str, Product], moments: Mapping[str, Moments], by_weights: frozenset[str]
    ) -> dict[str, InMetric]:
        """Bases in the metric of the moments, as far as these can be believed, or of nothing but the weights."""
        believed = {
            name: of_weights(moments[name]) if name in by_weights else shrunk(moments[name]) for name in products
        }
        return decompose_in_metric(products, believed)

    def _worse(
        self,
        found: Mapping[str, InMetric],
        products: Mapping[str, Product],
        moments: Mapping[str, Moments],
        judged_by: Sequence[Any],
    ) -> set[str]:
        """The layers that lose less by their singular values, on images that were kept out, over all ranks."""
        plain = self._in_metric(products, moments, frozenset(products))
        worse: set[str] = set()
        layers = [layer for layer in self.layers if layer.name in products]
        each_batch = map(samples_in, judged_by)
        for others in self._moments(layers, judged_by, lambda: self.work.judged(next(each_batch, 0))):
            for name, each in others.items():
                ratio = _relative_loss(found[name], each).log() - _relative_loss(plain[name], each).log()
                if bool(ratio.mean() > 0):
                    worse.add(name)
        return worse


def _one_each(ranks: Mapping[str, Any]) -> dict[str, int]:
    """The ranks of layers that have one each."""
    return {name: ranks_of(rank)[0] for name, rank in ranks.items()}


def _relative_loss(bases: InMetric, moments: Moments) -> Tensor:
    """What a cut to each rank from 1 on loses, relative to the loss of everything; what is less than rounding counts as
    that.
    """
    losses = losses_in_metric(Product(bases.p, bases.q), moments)
    return (losses[1:-1] / losses[0].clamp_min(torch.finfo(losses.dtype).tiny)).clamp_min(1e-9)
