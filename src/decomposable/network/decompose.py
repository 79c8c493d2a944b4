"""From a model to a network of any size: `decompose`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from warnings import warn

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from decomposable.core.criteria import Criterion, Scores, ScoresByLayer, find_criterion
from decomposable.core.draws import limits_of
from decomposable.core.factors import Factors, Taylor, factors_in_order
from decomposable.core.forms import DEFAULT, FormOf, check_form
from decomposable.core.layers import FilterFn, Layer, decomposed, in_order_of, require_layers
from decomposable.core.tracing import (
    Forward,
    Trace,
    call_with_first,
    layer_costs,
    macs_left_alone,
    not_counted,
    on_device_of,
    other_macs,
    trace,
)
from decomposable.core.tree import deep_copy, refuse_sharded, rewire, settle_lazy_, undisturbed, unwrap
from decomposable.core.unpacked import layers_of, opened_where_it_runs, refused_calls
from decomposable.network.calibration.batches import renewable
from decomposable.network.calibration.statistics import tracked_batch_norms
from decomposable.network.capture import Captured, Watch
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.goals import BY_DATA
from decomposable.network.importance import Order, order_by_data, require_one_cut
from decomposable.network.parts import NetworkState
from decomposable.network.probing import Trial, WeightsUsedElsewhere
from decomposable.progress import Progress, Report, shown
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.cost import LeftAlone
from decomposable_edge.sizing.order import Limits
from decomposable_edge.sizing.ranks import RankSelector

PRODUCTS = "products of two activations, as inside attention, which have no weights"
"""Why a module is skipped that has such products."""


@torch.inference_mode(False)  # weights made in that mode could not be trained after extract()
def decompose(
    model: nn.Module,
    example_input: Any = None,
    *,
    form: FormOf = DEFAULT,
    criterion: str | Criterion | ScoresByLayer | Taylor | None = None,
    data: Iterable[Any] | None = None,
    filter_fn: FilterFn | None = None,
    min_rank: int = 1,
    limits: Limits | None = None,
    forward: Forward | None = None,
    progress: Report | None = None,
) -> DecomposedNet:
    """Decompose every convolution and linear layer of a copy of the model; the model itself stays as it is.

    Args:
        model: any module. The result is in eval mode, whatever the model is in, and starts at full size.
        example_input: a tensor, or a batch whose first entry is the input; with `data`, by default its first batch. The
            full network runs it once, to count MACs, and the smallest network once, to see that it runs. Without an
            example input, sizes in MACs cannot be asked for, and nothing is tried.
        form: how convolutions become chains of layers, "spatial", "channel" or "tucker"; or one for each name pattern,
            of which the first that matches counts, as in ``{"layer4.*": "tucker", "*": "spatial"}``.
        criterion: which bases go first: "singular_value" (the default without data), "energy", "uniform",
            `Taylor(...)`, a function, or the `scores` of another network of the same layers, such as the one whose
            order it was trained in; with data, "loss" or "output" (by default the one that fits the network).
        data: for a network that was not trained to be cut: batches of a few hundred to a few thousand samples, without
            labels. Bases and their order then lose as little as possible of the network's answers ("loss", for
            logits), or of the values that it gives ("output"). A part of the samples is kept out and judges the cut:
            `net.cut_report`. The data is gone through several times.
        filter_fn: ``filter_fn(module, name)`` says which layers take part; `net.skipped` names the others.
        min_rank: the smallest rank of any layer.
        limits: smallest and largest rank by name pattern, such as ``{"conv1": (4, None), "layer4.*": (1, 64)}``.
        forward: ``forward(net, batch)`` where calling ``net`` with the batch's first entry is not right.
        progress: called with lines about what is done and how far it is; by default a terminal shows one.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3))
        >>> net = decompose(model, example_input=torch.zeros(1, 3, 8, 8))
        >>> plan = net.resize_(macs=0.5)
        >>> plan.macs <= 0.5 * plan.full_macs, net(torch.zeros(2, 3, 8, 8)).shape
        (True, torch.Size([2, 8, 6, 6]))
    """
    checked_form, call = check_form(form), forward or call_with_first
    from_weights = _check_criterion(criterion, data)
    batches = () if data is None else renewable(data, call, "data")
    if example_input is None:
        example_input = next(iter(batches), None)
    refuse_sharded(unwrap(model))
    closed = deep_copy(rewire(unwrap(model), {})).eval()
    batch = on_device_of(closed, example_input)
    base, filter_fn, stay_closed = opened_where_it_runs(closed, checked_form, filter_fn, batch, call)
    layers, skipped = layers_of(base, checked_form, filter_fn)
    chosen = _Chosen(base, layers, in_order_of(base, skipped | refused_calls(base) | stay_closed))
    if data is not None:
        require_one_cut(chosen.layers)
    bounds = _bounds(chosen.layers, min_rank, limits)
    seen, captured = None, Captured()
    if example_input is not None:
        seen, captured, used_elsewhere = _watched_pass(base, chosen.layers, batch, call)
        chosen = chosen.without(used_elsewhere).beside(seen.products)
    lazy = next((name for name, p in base.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        why, allowed = f"'{lazy}' is lazy and has seen no input", "a model that has run once, or an example_input"
        raise InvalidArgumentError.about("model", lazy, allowed, why=why)
    report = None
    with shown(progress) as line:
        line(Progress("decomposing", f"{len(chosen.layers)} layers"))
        factors, scores = factors_in_order(base, chosen.layers, decomposed(chosen.layers), from_weights)
        if seen is not None:
            smallest = {name: tuple(lower for lower, _ in cuts) for name, cuts in bounds.items()}
            trial = Trial(base=base, layers=chosen.layers, factors=factors, ranks=smallest, example=batch, forward=call)
            factors, unfit = trial.judge(seen.outputs)
            chosen = chosen.without(unfit)
        parts = _parts(chosen, factors, scores, bounds, seen, captured)
        if data is not None:
            assert criterion is None or isinstance(criterion, str)
            order, centred = Order(parts.factors, parts.selector), _centred(parts, chosen.layers, seen)
            with undisturbed(base):
                order = order_by_data(base, chosen.layers, order, batches, call, criterion, centred, report=line)
            parts, report = replace(parts, factors=order.factors, selector=order.selector), order.report
    net = DecomposedNet(base=base, layers=chosen.layers, parts=parts, forward=call)
    net.cut_report = report
    net._rows = captured.kept()
    return net


def _check_criterion(
    criterion: str | Criterion | ScoresByLayer | Taylor | None, data: Iterable[Any] | None
) -> Criterion | ScoresByLayer | Taylor:
    """Return the order by the weights, with which an order by data is compared."""
    if data is None:
        if isinstance(criterion, str) and criterion in BY_DATA:
            why = f"{criterion!r} needs data, and there is none"
            raise InvalidArgumentError.about("criterion", criterion, "with data=loader", why=why)
        criterion = "singular_value" if criterion is None else criterion
        return criterion if isinstance(criterion, Taylor) else find_criterion(criterion)
    if criterion is not None and (not isinstance(criterion, str) or criterion not in BY_DATA):
        allowed, why = " or ".join(map(repr, BY_DATA)), f"{criterion!r:.60} takes no data, and got data="
        raise InvalidArgumentError.about("criterion", criterion, allowed, why=why)
    return find_criterion("singular_value")


def _centred(parts: NetworkState, layers: Sequence[Layer], seen: Trace | None) -> set[str]:
    """Return the layers whose output goes into batch normalisation and nowhere else: its mean does not matter."""
    alone = set() if seen is None else seen.only_normalised
    return {layer.name for layer in layers if alone.issuperset(layer.modules)} & set(parts.layer_before_norm.values())


@dataclass(frozen=True, eq=False)
class _Chosen:
    """The layers of a model to decompose, and why the others are skipped."""

    base: nn.Module
    layers: tuple[Layer, ...]
    skipped: dict[str, str]

    def __post_init__(self) -> None:
        require_layers(self.layers, self.skipped)

    def without(self, reasons: Mapping[str, str]) -> _Chosen:
        """Skip the layers that have a reason; it is listed for every module that has the weight."""
        out = {
            module: reasons[layer.name] for layer in self.layers if layer.name in reasons for module in layer.modules
        }
        skipped = self.skipped | {name: out[module] for name, module in self.base.named_modules() if module in out}
        left = tuple(layer for layer in self.layers if layer.name not in reasons)
        return _Chosen(self.base, left, in_order_of(self.base, skipped))

    def beside(self, products: Mapping[nn.Module, int]) -> _Chosen:
        """List the modules that multiply activations, too: no size makes them smaller."""
        found = {name: PRODUCTS for name, module in self.base.named_modules() if module in products}
        return replace(self, skipped=in_order_of(self.base, found | self.skipped))


def _watched_pass(
    base: nn.Module, layers: Sequence[Layer], batch: Any, forward: Forward
) -> tuple[Trace, Captured, dict[str, str]]:
    """Run the full network once, and return what it showed.

    That is how often every weight is applied, how the network is called, and which weights are used other than by
    calling their layers.
    """
    watch = Watch(forward)
    with undisturbed(base), WeightsUsedElsewhere(layers) as elsewhere:
        seen = trace(base, batch, watch)
    settle_lazy_(base)
    captured = watch.captured(base)
    if forward is call_with_first and captured.unclear is not None:
        warn(
            f"example_input: {captured.unclear}; if they belong to it: forward=lambda net, batch: net(**batch)",
            stacklevel=4,  # whoever calls decompose
        )
    return seen, captured, elsewhere.used


def _bounds(layers: Sequence[Layer], min_rank: int, limits: Limits | None) -> dict[str, list[tuple[int, int]]]:
    """Return the smallest and the largest rank of every layer's cuts."""
    ends = zip(*(each.tolist() for each in limits_of(layers, min_rank, limits)), strict=True)
    return {layer.name: [next(ends) for _ in layer.full_ranks] for layer in layers}


def _parts(
    chosen: _Chosen,
    factors: Mapping[str, Factors],
    scores: Mapping[str, tuple[Scores, ...]],
    bounds: Mapping[str, list[tuple[int, int]]],
    watched: Trace | None,
    captured: Captured,
) -> NetworkState:
    """Return what the network consists of besides its modules, at full size; MACs are known if a pass was watched."""
    base, layers, seen = chosen.base, chosen.layers, watched or Trace()
    uncounted = {} if watched is None else not_counted(base, seen)
    ends = zip(*(ends for layer in layers for ends in bounds[layer.name]), strict=True)
    lower, upper = (np.array(each, dtype=np.int64) for each in ends)
    selector = RankSelector(
        costs=layer_costs(layers, seen),
        scores=tuple(each for layer in layers for each in scores[layer.name]),
        fixed_macs=None if watched is None else other_macs(layers, seen),
        fixed_params=sum(p.numel() for p in base.parameters()) - sum(layer.weight.numel() for layer in layers),
        lower=lower,
        upper=upper,
        left_alone=_left_alone(chosen, seen),
    )
    layer_names: dict[nn.Module | None, str] = {module: layer.name for layer in layers for module in layer.modules}
    layer_before_norm = {
        name: layer_names.get(seen.layer_before_norm.get(norm)) for name, norm in tracked_batch_norms(base).items()
    }
    return NetworkState(
        factors={layer.name: factors[layer.name] for layer in layers},
        selector=selector,
        plan=selector.full_plan(),
        layer_before_norm={name: feeder for name, feeder in layer_before_norm.items() if feeder is not None},
        skipped=_with_shares(chosen.skipped, selector, uncounted),
        not_counted=uncounted,
        call=captured.call,
        unclear=captured.unclear,
    )


def _left_alone(chosen: _Chosen, seen: Trace) -> tuple[LeftAlone, ...]:
    """Return what the skipped layers cost, without their submodules; a shared weight counts for its first module."""
    modules, macs = dict(chosen.base.named_modules()), macs_left_alone(seen) + seen.products
    params: Counter[str] = Counter()
    for name, parameter in chosen.base.named_parameters():
        params[name.rpartition(".")[0]] += parameter.numel()
    return tuple(
        LeftAlone(name=name, macs=seen.per_sample(macs.get(modules[name], 0)), params=params[name])
        for name in chosen.skipped
    )


def _with_shares(skipped: Mapping[str, str], selector: RankSelector, uncounted: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons, each with the part of the network that is left alone for it."""
    macs, params = selector.full_cost("macs"), selector.full_cost("params")
    knows_macs = selector.fixed_macs is not None and macs > 0
    found = {}
    for part in selector.left_alone:
        of_macs = "MACs not counted, " if part.name in uncounted else f"{part.macs / max(1, macs):.1%} of the MACs, "
        shares = f"{of_macs if knows_macs else ''}{part.params / params:.1%} of the parameters"
        found[part.name] = f"{skipped[part.name]}; {shares}"
    return found
