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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.factors import Factors
from decomposable.core.forms import to_factors, to_weight
from decomposable.core.layers import Layer
from decomposable.core.metric import InMetric, Product, decompose_in_metric, losses_in_metric
from decomposable.core.moments import NoGradientError, second_moments
from decomposable.core.sums import Moments, of_weights, shrunk
from decomposable.core.tracing import Forward
from decomposable.network.allocation import Way, best_way
from decomposable.network.calibration.statistics import averaged, tracked_batch_norms
from decomposable.network.goals import OUTPUT, Goal
from decomposable.network.judging import Judge, JudgedSize
from decomposable.network.samples import Samples
from decomposable.network.turned import Numbers, TurnedBases, ordered, write_
from decomposable.network.work import MEASURED_AGAIN_WITH, MEMORY, Work, goal_sizes, on_the_way
from decomposable_edge.sizing.chain import ranks_of
from decomposable_edge.sizing.ranks import RankSelector

_TINY = torch.finfo(torch.float64).tiny

Put = Callable[[Way], nn.Module]
"""The network of the wanted size, with the cut shared out in a way."""

Choose = Callable[[float, Put], Way]
"""``choose(size, put)``: the way in which a cut to a size is shared out among the layers."""


@dataclass(frozen=True, eq=False)
class Found:
    """Where a way down ended: the bases of all layers, their order, and the layers whose bases are those of their
    weights.
    """

    bases: Mapping[str, TurnedBases]
    selector: RankSelector
    by_weights: frozenset[str]


@dataclass(eq=False)
class _Track:
    """The bases that a part of the data gives all layers, and their order so far."""

    bases: Mapping[str, TurnedBases]
    selector: RankSelector
    losses: dict[str, Numbers] = field(default_factory=dict)

    def drop(self, size: float) -> None:
        """Drop what a network of this size does without. Unrounded: it is the order of bases that is looked for."""
        for name, rank in self.selector.of_size(size, "macs", align=1).ranks.items():
            self.bases[name].drop(*ranks_of(rank))


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

    def run(self, samples: Samples, choose: Choose) -> tuple[Found, ...]:
        """Go down, and return what was found: of halves what each of them says, and last what all samples say.

        Halves have bases of their own. All are measured in the network that all samples have cut, in one pass: what is
        measured with one half knows nothing of the other but by that.
        """
        tracks = [
            _Track({layer.name: TurnedBases.of(layer) for layer in self.layers}, self.by_weights)
            for _ in range(3 if samples.are_halves else 1)
        ]
        goals, by_weights = goal_sizes(self.by_weights), frozenset[str]()
        for place, goal in enumerate((*goals, None)):
            by_weights = self._measured(tracks, samples, by_weights, is_judged=place == 0)
            for size in on_the_way(goal, goals, self.by_weights.smallest_size):
                way = choose(size, self._put(tracks[0], size))
                for track in tracks:
                    track.selector = ordered(self.by_weights, track.bases, track.losses, way)
                    if goal is not None:
                        track.drop(size)
            if goal is not None:
                samples = samples.first(MEASURED_AGAIN_WITH)
                self._cut_to_(tracks[-1].bases, samples.all_that_measure, goal)
        self.at_full_size_()
        return tuple(Found(track.bases, track.selector, by_weights) for track in tracks)

    def _cut_to_(self, bases: Mapping[str, TurnedBases], samples: Samples, goal: float) -> None:
        """Write the network of this size, with statistics of its own."""
        write_(self.layers, {name: one.kept for name, one in bases.items()}, bases)
        if tracked_batch_norms(self.base):
            with self.work.averaging(samples, goal) as seen:  # which leaves them in the network
                averaged([lambda: self.base], self.forward, samples.measure, lambda *_: seen(), asker="decompose")

    def compared(self, found: Found, judge: Judge, size: float) -> JudgedSize:
        """The distances of two networks of a size to the full one: as it was found, and by singular values."""
        with self.work.comparing(size, judge.samples):
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
            p, q = to_factors(first, second)
            rank = _one_each(ranks)[layer.name]
            layer.weight.copy_(to_weight(p[:, :rank] @ q[:rank], layer.shape, layer.form))

    def _put(self, track: _Track, size: float) -> Put:
        def put(way: Way) -> nn.Module:
            selector = ordered(self.by_weights, track.bases, track.losses, way)
            ranks = _one_each(selector.of_size(size, "macs", align=1).ranks)
            write_(self.layers, {name: min(rank, track.bases[name].kept) for name, rank in ranks.items()}, track.bases)
            return self.base

        return put

    def _measured(
        self, tracks: Sequence[_Track], samples: Samples, by_weights: frozenset[str], *, is_judged: bool
    ) -> frozenset[str]:
        """Turn every layer's bases into those of its metric, and note what leaving out each of them loses; return which
        layers are cut by their weights.
        """
        try:
            return self._turned(tracks, samples, by_weights, is_judged)
        except NoGradientError:
            if self.goal is not OUTPUT:
                raise
            self._is_blind = True  # then every layer's own output counts, and the network's in sharing a cut out
        return self._turned(tracks, samples, by_weights, is_judged)

    def _turned(
        self, tracks: Sequence[_Track], samples: Samples, by_weights: frozenset[str], is_judged: bool
    ) -> frozenset[str]:
        with self.work.measuring(samples, with_judges=is_judged or samples.are_halves) as seen:
            streams = [self._moments(samples.measure, 0, seen)]
            if is_judged or samples.are_halves:
                streams.append(self._moments(samples.judge, samples.batches, seen))
            while parts := [moments for stream in streams for moments in islice(stream, 1)]:
                by_weights = self._turn(tracks, parts, by_weights, is_judged)
                del parts  # before the next pass needs the memory
        return by_weights

    def _moments(self, batches: Iterable[Any], first: int, seen: Callable[[], None]) -> Iterator[dict[str, Moments]]:
        loss = None if self._is_blind else self.goal.loss
        options: dict[str, Any] = {"centred": self.centred, "memory": MEMORY, "first": first, "seen": seen}
        return second_moments(self.base, self.layers, batches, self.forward, loss, **options)

    def _turn(
        self,
        tracks: Sequence[_Track],
        parts: Sequence[Mapping[str, Moments]],
        by_weights: frozenset[str],
        is_judged: bool,
    ) -> frozenset[str]:
        """Turn the bases of some layers, whose moments each part of the data gives."""
        moments = list(parts[: len(tracks)])
        if len(tracks) > len(parts):
            moments.append({name: one.joined(parts[1][name]) for name, one in parts[0].items()})
        products = [{name: track.bases[name].what_is_kept for name in parts[0]} for track in tracks]
        found = [_in_metric(*each, by_weights) for each in zip(products, moments, strict=True)]
        if is_judged:
            plain = _in_metric(products[0], moments[0], frozenset(products[0]))
            for bases, others in zip(found, reversed(parts), strict=False):  # each part by the other
                by_weights |= {name for name in plain if _is_worse(bases[name], plain[name], others[name])}
            for bases, all_products, each in zip(found, products, moments, strict=True):
                bases |= _in_metric({name: all_products[name] for name in plain.keys() & by_weights}, each, by_weights)
        for track, bases in zip(tracks, found, strict=True):
            track.losses |= {name: track.bases[name].turn(each) for name, each in bases.items()}
        return by_weights


def _in_metric(
    products: Mapping[str, Product], moments: Mapping[str, Moments], by_weights: frozenset[str]
) -> dict[str, InMetric]:
    """Bases in the metric of the moments, as far as these can be believed, or of nothing but the weights."""
    believed = {name: of_weights(moments[name]) if name in by_weights else shrunk(moments[name]) for name in products}
    return decompose_in_metric(products, believed)


def _is_worse(bases: InMetric, plain: InMetric, others: Moments) -> bool:
    """Whether a layer loses more than by its singular values on images that were kept out: by the mean of the logarithm
    of the losses' ratio, over all ranks that save something.
    """
    ratio = _relative_loss(bases, others).log() - _relative_loss(plain, others).log()
    return bool(ratio.mean() > 0)


def _one_each(ranks: Mapping[str, Any]) -> dict[str, int]:
    """The ranks of layers that have one each."""
    return {name: ranks_of(rank)[0] for name, rank in ranks.items()}


def _relative_loss(bases: InMetric, moments: Moments) -> Tensor:
    """What a cut to each rank loses, from 1 to the last at which two factors have fewer numbers than their product;
    relative to the loss of everything. What is less than rounding counts as that.
    """
    losses = losses_in_metric(Product(bases.p, bases.q), moments)
    rows, columns = len(bases.p), bases.q.shape[1]
    most = max(1, rows * columns // (rows + columns))
    return (losses[1 : min(most + 1, len(losses) - 1)] / losses[0].clamp_min(_TINY)).clamp_min(1e-9)
