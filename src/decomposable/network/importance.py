"""The bases of a trained network and their order, by what a cut loses on data: `decompose(data=…)`.

Bases and their order are found on a way down from the full network (`descent.py`). Nothing is believed only because it
fits the images that it was measured with:

- moments are shrunk if they come from few images (`core/sums.py`);
- images that were kept out (`samples.py`) say for every layer whether its metric is better than its singular values;
- they choose how a cut is shared out among the layers (`sharing.py`);
- they compare the result with a cut by singular values (`judging.py`), which is taken if data do no better.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from decomposable.core.factors import Factors, memory_format_of
from decomposable.core.forms import MATRIX_FORMS
from decomposable.core.layers import Layer, laid_out
from decomposable.core.tracing import Forward, on_device_of
from decomposable.network.descent import Descent
from decomposable.network.goals import LOOKED_AT, LOSS, OUTPUT, goal_of, is_certain, logits_in
from decomposable.network.judging import COMPARED_WITH, CutReport, Judge, prefers_weights, sizes_to_judge
from decomposable.network.samples import dealt
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
    """Every layer's factors, best basis first, the selector that knows the order of all, and how a cut was judged."""

    factors: Mapping[str, Factors]
    selector: RankSelector
    report: CutReport | None = None


def order_by_data(
    base: nn.Module,
    layers: Sequence[Layer],
    by_weights: Order,
    batches: Iterable[Any],
    forward: Forward,
    criterion: str | None,
    centred: Collection[str],
    *,
    report: Report,
) -> Order:
    """Return the bases in the order of what a cut loses on data; or by singular values, if these do no worse.

    `centred` layers are followed by batch normalisation. The network's statistics are written to; its weights are as
    before afterwards.
    """

    def run(net: nn.Module, batch: Any) -> Any:
        return forward(net, on_device_of(net, batch))

    warn = partial(warnings.warn, stacklevel=4)  # at who called decompose
    with torch.no_grad():
        samples = dealt(batches, partial(run, base))
        goal = goal_of(criterion, (run(base, batch) for batch in islice(samples.measure, LOOKED_AT)))
        if not samples.judge:
            warn(ONE_BATCH)
            return replace(by_weights, report=CutReport(criterion=goal.name, unit=goal.unit, kept="weights"))
        if goal is LOSS and all(is_certain(logits_in(run(base, batch))) for batch in samples.judge):
            warn(CERTAIN)
            goal = OUTPUT
    selector = by_weights.selector
    judged_at = sizes_to_judge(selector.smallest_size)
    work = Work(layers, samples, selector.smallest_size, judged_at, report)
    descent = Descent(base, layers, selector, by_weights.factors, run, goal, centred, work)
    judges = [Judge.of(base, tuple(each), run, goal) for each in samples.judges]
    all_found = descent.run(samples, judges[0])
    judges = [judge.first(COMPARED_WITH // len(judges)) for judge in judges]
    judged = CutReport(
        criterion=goal.name,
        unit=goal.unit,
        measured_with=samples.count if samples.are_halves else samples.measuring,
        judged_with=sum(judge.samples for judge in judges),
        is_crossed=samples.are_halves,
        sizes=tuple(descent.compared(all_found, judges, size) for size in judged_at),
        kept="data",
        layers_by_weights=tuple(sorted(descent.by_weights)),
    )
    if prefers_weights(judged.sizes):
        warn(NO_BETTER.format(judged.judged_with))
        return replace(by_weights, report=replace(judged, kept="weights", layers_by_weights=()))
    factors = {}
    for layer in layers:  # in the memory layout that suits this network
        new, old = all_found[-1].bases[layer.name].factors(layer), by_weights.factors[layer.name]
        factors[layer.name] = tuple(laid_out(a, memory_format_of(b)) for a, b in zip(new, old, strict=True))
    return Order(factors, all_found[-1].selector, judged)


def require_one_cut(layers: Sequence[Layer]) -> None:
    """Refuse layers whose chain has several cuts: the metric is that of a matrix."""
    for layer in layers:
        if len(layer.full_ranks) > 1:
            forms = ", ".join(map(repr, MATRIX_FORMS))
            allowed = f"{forms}, or a criterion by the weights alone, such as 'singular_value'"
            text = f"layer '{layer.name}': form={layer.form!r} with bases by data; allowed: {allowed}"
            raise InvalidArgumentError.about("form", layer.form, allowed, text, layer=layer.name)
