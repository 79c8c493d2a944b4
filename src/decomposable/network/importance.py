"""The bases of a trained network and their order, by what a cut loses on data: `decompose(data=…)`.

Bases and their order are found on a way down from the full network (`descent.py`). Nothing is believed because it fits
the images that it was measured with. Moments are shrunk by how few these are (`core/sums.py`). Images that were
kept out (`samples.py`) say for every layer whether its metric is better than its singular values, share a cut out among
the layers (`allocation.py`), and compare the whole with a cut by singular values (`judging.py`), which is what is taken
where data do no better.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from decomposable.core.factors import Factors
from decomposable.core.forms import MATRIX_FORMS
from decomposable.core.layers import Layer
from decomposable.core.tracing import Forward
from decomposable.network.calibration.statistics import tracked_batch_norms
from decomposable.network.descent import Descent, Found, searched
from decomposable.network.goals import LOSS, OUTPUT, Goal, is_certain, logits_in
from decomposable.network.judging import (
    COMPARED_WITH,
    SEARCHED_WITH,
    CutReport,
    Judge,
    JudgedSize,
    prefers_weights,
    sizes_to_judge,
)
from decomposable.network.samples import Samples
from decomposable.network.work import Work
from decomposable.progress import Report
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.ranks import RankSelector

ONE_BATCH = (
    "data: one batch that cannot be parted, so that nothing is left to judge a cut by; bases go by singular values"
)
CERTAIN = (
    "criterion='loss': the network is certain of every image, so that no gradient comes back to any layer; its bases "
    "are ordered by what its outputs lose"
)
NO_BETTER = (
    "data: on {} samples that were kept out a cut by data is no better than one by singular values, which is taken; "
    "more samples may help"
)


@dataclass(frozen=True, eq=False)
class Order:
    """Every layer's factors, best basis first, the selector that knows the order of all of them, and how it came."""

    factors: Mapping[str, Factors]
    selector: RankSelector
    report: CutReport | None = None


def order_by_data(
    base: nn.Module,
    layers: Sequence[Layer],
    by_weights: Order,
    samples: Samples,
    forward: Forward,
    *,
    goal: Goal,
    centred: Collection[str] = (),
    report: Report,
) -> Order:
    """Bases by what their going loses of a goal; those by singular values, where they do no worse.

    `centred` layers are followed by batch normalisation. The network's weights and statistics are written to meanwhile,
    and as before afterwards.
    """
    if not samples.judge:
        warnings.warn(ONE_BATCH, stacklevel=5)  # at who called decompose
        return replace(by_weights, report=_report(goal, samples, None, "weights"))
    selector = by_weights.selector
    if goal is LOSS and _is_certain_of_all(base, samples, forward):
        warnings.warn(CERTAIN, stacklevel=5)
        goal = OUTPUT
    judged_at = sizes_to_judge(selector.smallest_size)
    work = Work.planned(layers, samples, selector, judged_at, report)
    descent = Descent(base, layers, selector, by_weights.factors, forward, goal, frozenset(centred), work)
    with _restored(base, layers):
        judged = _judged(descent, samples, judged_at)
    if prefers_weights(judged.sizes):
        warnings.warn(NO_BETTER.format(judged.samples), stacklevel=5)
        return replace(by_weights, report=_report(goal, samples, judged, "weights"))
    factors = {layer.name: judged.found.bases[layer.name].factors(layer) for layer in layers}
    return Order(factors, judged.found.selector, _report(goal, samples, judged, "data"))


@dataclass(frozen=True, eq=False)
class _Judged:
    """What was found, how it does beside a cut by singular values, and by how many samples that is told."""

    found: Found
    sizes: Sequence[JudgedSize]
    samples: int


@torch.no_grad()
def _is_certain_of_all(base: nn.Module, samples: Samples, forward: Forward) -> bool:
    return all(is_certain(logits_in(forward(base, batch))) for batch in samples.judge)


def _judged(descent: Descent, samples: Samples, sizes: Sequence[float]) -> _Judged:
    """What was found, judged. Of few samples each half judges what the other has found, and the mean of both is told of
    what they find together.
    """
    judges = [Judge.of(descent.base, tuple(each), descent.forward, descent.goal) for each in samples.judges]
    found = descent.run(samples, searched(judges[0].first(SEARCHED_WITH), descent.work))
    judges = [judge.first(COMPARED_WITH // len(judges)) for judge in judges]
    compared = [
        _mean([descent.compared(one, judge, size) for one, judge in zip(found, judges, strict=False)]) for size in sizes
    ]
    return _Judged(found[-1], compared, sum(judge.samples for judge in judges))


def _mean(judged: Sequence[JudgedSize]) -> JudgedSize:
    """What several judges say of a size."""
    count = len(judged)
    return JudgedSize(
        size=judged[0].size,
        by_data=sum(each.by_data for each in judged) / count,
        by_weights=sum(each.by_weights for each in judged) / count,
    )


def _report(goal: Goal, samples: Samples, judged: _Judged | None, kept: str) -> CutReport:
    if judged is None:
        return CutReport(criterion=goal.name, unit=goal.unit, measured_with=0, judged_with=0, sizes=(), kept=kept)
    return CutReport(
        criterion=goal.name,
        unit=goal.unit,
        measured_with=samples.count if samples.are_halves else samples.measuring,
        judged_with=judged.samples,
        is_crossed=samples.are_halves,
        sizes=tuple(judged.sizes),
        kept=kept,
        layers_by_weights=tuple(sorted(judged.found.by_weights)) if kept == "data" else (),
    )


def require_one_cut(layers: Sequence[Layer]) -> None:
    """Refuse layers whose chain has several cuts: the metric is that of a matrix."""
    for layer in layers:
        if len(layer.full_ranks) > 1:
            raise InvalidArgumentError(
                f"layer '{layer.name}': form={layer.form!r} with bases by data; allowed: "
                f"{', '.join(map(repr, MATRIX_FORMS))}, or a criterion by the weights alone, such as 'singular_value'"
            )


@contextmanager
def _restored(base: nn.Module, layers: Sequence[Layer]) -> Iterator[None]:
    """Afterwards the weights, the statistics and how these are averaged are as before."""
    weights = {layer.weight: layer.weight.detach().clone() for layer in layers}
    norms = [(norm, norm._buffers, norm.momentum, norm.training) for norm in tracked_batch_norms(base).values()]
    for norm, buffers, _, _ in norms:
        norm._buffers = {name: None if each is None else each.clone() for name, each in buffers.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, before in weights.items():
                weight.copy_(before)
        for norm, buffers, momentum, mode in norms:
            norm._buffers, norm.momentum, norm.training = buffers, momentum, mode
