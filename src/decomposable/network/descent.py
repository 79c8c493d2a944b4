"""The way down from the full network to the smallest: bases that data give the layers, and their order.

A metric tells what a layer's cut loses while all other layers stay as they are (`core/metric.py`). That is right for a
small cut, and too optimistic for a large one. So the network is measured again on the way down:

    measure the network ─▶ bases and losses in that metric ─▶ order by loss per MAC ─▶ cut to the next size ─▶ measure …

At each such step a search chooses how the cut is shared out among the layers (`sharing.py`). Bases that were dropped
stay behind all others, and those that were kept are turned among themselves. So a size contains every smaller one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.factors import Factors
from decomposable.core.forms import to_factors
from decomposable.core.layers import Layer
from decomposable.core.metric import InMetric, Product, decompose_in_metric, losses_in_metric
from decomposable.core.moments import NoGradientError, second_moments
from decomposable.core.sums import Moments, of_weights, shrunk
from decomposable.core.tracing import Forward
from decomposable.core.tree import rewire
from decomposable.network.calibration.statistics import averaged, tracked_batch_norms
from decomposable.network.goals import OUTPUT, Goal
from decomposable.network.judging import SEARCHED_WITH, Judge, JudgedSize
from decomposable.network.samples import Samples
from decomposable.network.sharing import TurnedBases, Way, best_way, ordered, write_
from decomposable.network.work import MEASURED_AGAIN_WITH, MEMORY, Work, stages
from decomposable_edge.sizing.chain import ranks_of
from decomposable_edge.sizing.ranks import RankSelector

_TINY = torch.finfo(torch.float64).tiny


@dataclass(eq=False)
class Found:
    """The bases that a part of the data gives all layers, and their order so far."""

    bases: Mapping[str, TurnedBases]
    selector: RankSelector


@dataclass(eq=False)
class Descent:
    """What goes down: a network, whose weights and statistics are written to, and how it is run and measured.

    `selector` has the order of the singular values, `factors` their bases. `centred` layers are followed by batch
    normalisation. `by_weights` are the layers whose bases stay those of the singular values, because data do no better.
    """

    base: nn.Module
    layers: Sequence[Layer]
    selector: RankSelector
    factors: Mapping[str, Factors]
    forward: Forward
    goal: Goal
    centred: Collection[str]
    work: Work
    by_weights: set[str] = field(default_factory=set)
    _is_blind: bool = False  # no gradient can be had: every layer's own output counts, and the network's in the search
    _way: Way = 0.0  # in which the last cut was shared out

    def __post_init__(self) -> None:
        self._plain = {name: TurnedBases(*to_factors(*each), len(each[0])) for name, each in self.factors.items()}
        self._originals = {layer.name: layer.weight.detach().clone() for layer in self.layers}

    def run(self, samples: Samples, judge: Judge) -> list[Found]:
        """Go down, and return what was found: of halves what each of them says, and last what all samples say.

        Halves have bases of their own. All are measured in the network that all samples have cut, in one pass. So what
        one half has measured depends on the other half only through that cut.
        """
        judge = judge.first(SEARCHED_WITH)
        all_found = [
            Found({layer.name: TurnedBases.of(layer) for layer in self.layers}, self.selector)
            for _ in range(3 if samples.are_halves else 1)
        ]
        for place, (goal, steps) in enumerate(stages(self.selector.smallest_size)):
            self._measure(all_found, samples, is_judged=place == 0)
            for size in steps:
                way = self._search(all_found[0].bases, judge, size)
                for found in all_found:
                    found.selector = ordered(self.selector, found.bases, way)
                    if goal is not None:  # unrounded: only the order of the bases is wanted
                        for name, rank in _ranks(found.selector, size, align=1).items():
                            found.bases[name].kept = min(found.bases[name].kept, rank)
            if goal is not None:
                samples = samples.first(MEASURED_AGAIN_WITH)
                self._cut_to_(all_found[-1].bases, samples.all_that_measure, goal)
        self._restore_()
        return all_found

    def compared(self, all_found: Sequence[Found], judges: Sequence[Judge], size: float) -> JudgedSize:
        """Compare two networks of a size with the full one; of several judges, each of what it has not seen, the mean.

        One network is cut as it was found, the other by singular values.
        """
        distances = []
        for found, judge in zip(all_found, judges, strict=False):
            with self.work.comparing(size, judge.samples):
                for selector, bases in ((found.selector, found.bases), (self.selector, self._plain)):
                    write_(self.layers, _ranks(selector, size), bases)
                    distances.append(judge.distance(self.base))
        self._restore_()
        by_data, by_weights = (sum(distances[i::2]) / len(judges) for i in (0, 1))
        return JudgedSize(size=size, by_data=by_data, by_weights=by_weights)

    @torch.no_grad()
    def _restore_(self) -> None:
        for layer in self.layers:
            layer.weight.copy_(self._originals[layer.name])

    def _cut_to_(self, bases: Mapping[str, TurnedBases], samples: Samples, size: float) -> None:
        """Write the network of this size, with statistics of its own."""
        write_(self.layers, {name: one.kept for name, one in bases.items()}, bases)
        if tracked_batch_norms(self.base):
            with self.work.averaging(samples, size) as done:
                twin = rewire(self.base, {})  # it shares the statistics, and is put into training mode
                averaged([lambda: twin], self.forward, samples.measure, lambda *_: done(), option="data")

    def _search(self, bases: Mapping[str, TurnedBases], judge: Judge, size: float) -> Way:
        """Return the way to share out a cut whose network is nearest to the full one, beginning with the last one."""
        with self.work.sharing(size) as done:

            def distance(way: Way) -> float:
                ranks = _ranks(ordered(self.selector, bases, way), size, align=1)
                write_(self.layers, {name: min(rank, bases[name].kept) for name, rank in ranks.items()}, bases)
                found = judge.distance(self.base)
                done()
                return found

            self._way = best_way(distance, self._way)
        return self._way

    def _measure(self, all_found: Sequence[Found], samples: Samples, *, is_judged: bool) -> None:
        """Turn all bases into those of their metric, and note what leaving out each of them loses."""
        try:
            self._turn_all(all_found, samples, is_judged)
        except NoGradientError:
            if self.goal is not OUTPUT:
                raise
            self._is_blind = True
            self._turn_all(all_found, samples, is_judged)

    def _turn_all(self, all_found: Sequence[Found], samples: Samples, is_judged: bool) -> None:
        with_judges = is_judged or samples.are_halves
        loss = None if self._is_blind else self.goal.loss
        with self.work.measuring(samples, with_judges=with_judges) as done:
            options: dict[str, Any] = {"centred": self.centred, "memory": MEMORY, "seen": done}
            data = [(samples.measure, 0), (samples.judge, samples.batches)][: 1 + with_judges]
            streams = [
                second_moments(self.base, self.layers, batches, self.forward, loss, first=first, **options)
                for batches, first in data
            ]
            while parts := [moments for stream in streams for moments in islice(stream, 1)]:
                self._turn(all_found, parts, is_judged)
                del parts  # before the next pass needs the memory

    def _turn(self, all_found: Sequence[Found], parts: Sequence[Mapping[str, Moments]], is_judged: bool) -> None:
        """Turn the bases of the layers whose moments each part of the data gives."""
        moments = list(parts[: len(all_found)])
        if len(all_found) > len(parts):
            moments.append({name: one.joined(parts[1][name]) for name, one in parts[0].items()})
        products = [{name: found.bases[name].what_is_kept for name in parts[0]} for found in all_found]
        turned = [self._in_metric(*each) for each in zip(products, moments, strict=True)]
        if is_judged:
            plain = decompose_in_metric(products[0], {name: of_weights(one) for name, one in moments[0].items()})
            worse = {
                name
                for bases, others in zip(turned, reversed(parts), strict=False)  # each part by the other
                for name in plain
                if _is_worse(bases[name], plain[name], others[name])
            }
            self.by_weights |= worse
            for bases, all_products, each in zip(turned, products, moments, strict=True):
                bases |= self._in_metric({name: all_products[name] for name in plain if name in worse}, each)
        for found, bases in zip(all_found, turned, strict=True):
            for name, in_metric in bases.items():
                found.bases[name].turn(in_metric)

    def _in_metric(self, products: Mapping[str, Product], moments: Mapping[str, Moments]) -> dict[str, InMetric]:
        """Return bases in the metric of the moments, as far as these can be believed, or of the weights alone."""
        believed = {
            name: of_weights(moments[name]) if name in self.by_weights else shrunk(moments[name]) for name in products
        }
        return decompose_in_metric(products, believed)


def _ranks(selector: RankSelector, size: float, **how: Any) -> dict[str, int]:
    """Return the ranks of a size, one for each layer."""
    return {name: ranks_of(rank)[0] for name, rank in selector.of_size(size, "macs", **how).ranks.items()}


def _is_worse(bases: InMetric, plain: InMetric, others: Moments) -> bool:
    """Return whether bases lose more than singular values on images that were kept out.

    The mean logarithm of the ratio of the losses says so, over all ranks that save something.
    """
    ratio = _relative_loss(bases, others).log() - _relative_loss(plain, others).log()
    return bool(ratio.mean() > 0)


def _relative_loss(bases: InMetric, moments: Moments) -> Tensor:
    """Return what a cut to each rank loses, as a part of the whole loss, for all ranks that make the layer smaller."""
    losses = losses_in_metric(Product(bases.p, bases.q), moments)
    rows, columns = len(bases.p), bases.q.shape[1]
    most = max(1, rows * columns // (rows + columns))
    return (losses[1 : min(most + 1, len(losses) - 1)] / losses[0].clamp_min(_TINY)).clamp_min(1e-9)  # rounding
