"""From a model to a network of any size: `decompose`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from warnings import warn

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from decomposable.core.criteria import Criterion, find_criterion
from decomposable.core.factors import factors_in_order
from decomposable.core.forms import check_form, to_matrix
from decomposable.core.layers import (
    FilterFn,
    Layer,
    find_layers,
    in_order_of,
    require_layers,
)
from decomposable.core.svd import svd
from decomposable.core.taylor import Taylor
from decomposable.core.tracing import (
    Forward,
    Trace,
    call_with_first,
    layer_costs,
    not_counted,
    on_device_of,
    other_macs,
    trace,
)
from decomposable.core.tree import deep_copy, rewire, settle_lazy_, unwrap
from decomposable.errors import InvalidArgumentError
from decomposable.network.calibration.statistics import tracked_batch_norms
from decomposable.network.capture import Captured, Watch
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.leftalone import parts_left_alone, reasons_with_shares
from decomposable.network.parts import Parts
from decomposable.network.probing import Trial, undisturbed, weights_used_elsewhere
from decomposable.sizing.ranks import Limits, RankSelector, rank_limits


@torch.inference_mode(False)  # weights made in that mode could not be trained after extract()
def decompose(
    model: nn.Module,
    example_input: Any = None,
    *,
    form: str = "spatial",
    criterion: str | Criterion | Taylor = "singular_value",
    filter_fn: FilterFn | None = None,
    min_rank: int = 1,
    limits: Limits | None = None,
    forward: Forward | None = None,
) -> DecomposedNet:
    """Decompose every convolution and linear layer of a copy of the model; the model itself stays as it is.

    Args:
        model: any module. The result is in eval mode, whatever the model is in, and starts at full size.
        example_input: a tensor, or a batch whose first entry is the input. A pass of the full network with it tells the
            sizes of the feature maps, one of the smallest whether the model runs with two factors in the place of its
            layers. Without it, sizes in MACs cannot be asked for, and nothing is tried.
        form: how convolution weights become matrices, "spatial" or "channel".
        criterion: which bases go first: "singular_value", "energy", "uniform", `Taylor(...)` or a function.
        filter_fn: ``filter_fn(module, name)`` says which layers take part; `net.skipped` names the others.
        min_rank: the smallest rank of any layer.
        limits: smallest and largest rank by name pattern, such as ``{"conv1": (4, None), "layer4.*": (1, 64)}``.
        forward: ``forward(net, batch)`` where calling ``net`` with the batch's first entry is not right.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3))
        >>> net = decompose(model, example_input=torch.zeros(1, 3, 8, 8))
        >>> plan = net.resize_(macs=0.5)
        >>> plan.macs <= 0.5 * plan.full_macs, net(torch.zeros(2, 3, 8, 8)).shape
        (True, torch.Size([2, 8, 6, 6]))
    """
    checked_form = check_form(form)
    if not isinstance(criterion, Taylor):
        criterion = find_criterion(criterion)
    base = deep_copy(rewire(unwrap(model), {})).eval()
    layers, skipped = find_layers(base, checked_form, filter_fn)
    require_layers(layers, skipped)
    bounds = _bounds(layers, min_rank, limits)
    call, has_example = forward or call_with_first, example_input is not None
    batch, seen, captured = on_device_of(base, example_input), Trace(), Captured()
    if has_example:
        watch = Watch(call)
        with undisturbed(base), weights_used_elsewhere(layers) as used:
            seen = trace(base, batch, watch)
        settle_lazy_(base)
        captured = watch.captured(base)
        if call is call_with_first and captured.unclear is not None:
            warn(
                f"example_input: {captured.unclear}; if they belong to it: forward=lambda net, batch: net(**batch)",
                stacklevel=3,
            )
        layers, skipped = _without(base, layers, skipped, used)
    _require_no_lazy(base)
    decompositions = svd({layer.name: to_matrix(layer.weight.detach(), layer.form) for layer in layers})
    factors, scores = factors_in_order(base, layers, decompositions, criterion)
    if has_example:
        smallest = {name: lower for name, (lower, _) in bounds.items()}
        trial = Trial(base=base, layers=layers, factors=factors, ranks=smallest, example=batch, forward=call)
        factors, unfit = trial.judge(seen.outputs)
        layers, skipped = _without(base, layers, skipped, unfit)
    lower, upper = (np.array(ends, dtype=np.int64) for ends in zip(*(bounds[x.name] for x in layers), strict=True))
    selector = RankSelector(
        costs=layer_costs(layers, seen),
        scores=tuple(scores[layer.name] for layer in layers),
        fixed_macs=other_macs(base, layers, seen) if has_example else None,
        fixed_params=sum(p.numel() for p in base.parameters()) - sum(layer.weight.numel() for layer in layers),
        lower=lower,
        upper=upper,
        left_alone=parts_left_alone(base, skipped, seen),
    )
    uncounted = not_counted(base, seen) if has_example else {}
    parts = Parts(
        factors={layer.name: factors[layer.name] for layer in layers},
        selector=selector,
        plan=selector.full_plan(),
        feeders=_named_feeders(base, layers, seen),
        skipped=reasons_with_shares(skipped, selector, uncounted),
        not_counted=uncounted,
        call=captured.call,
        unclear=captured.unclear,
    )
    net = DecomposedNet(base=base, layers=layers, parts=parts, forward=call)
    net._rows = captured.kept()
    return net


def _bounds(layers: Sequence[Layer], min_rank: int, limits: Limits | None) -> dict[str, tuple[int, int]]:
    """The smallest and largest rank of every layer."""
    names = [layer.name for layer in layers]
    lower, upper = rank_limits(names, [layer.full_rank for layer in layers], min_rank, limits)
    return dict(zip(names, zip(lower.tolist(), upper.tolist(), strict=True), strict=True))


def _without(
    base: nn.Module, layers: tuple[Layer, ...], skipped: dict[str, str], reasons: Mapping[str, str]
) -> tuple[tuple[Layer, ...], dict[str, str]]:
    """The layers without those that there is a reason for, which is listed for every module that has the weight."""
    out = {module: reasons[layer.name] for layer in layers if layer.name in reasons for module in layer.modules}
    skipped = skipped | {name: out[module] for name, module in base.named_modules() if module in out}
    layers, skipped = tuple(x for x in layers if x.name not in reasons), in_order_of(base, skipped)
    require_layers(layers, skipped)
    return layers, skipped


def _require_no_lazy(base: nn.Module) -> None:
    lazy = next((name for name, p in base.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise InvalidArgumentError(
            f"model: '{lazy}' is lazy and has seen no input; allowed: a model that has run once, or an example_input"
        )


def _named_feeders(base: nn.Module, layers: Sequence[Layer], seen: Trace) -> dict[str, str]:
    """For every normalisation layer fed by a decomposed layer, that layer's name."""
    layer_names: dict[nn.Module, str] = {module: layer.name for layer in layers for module in layer.modules}
    return {
        name: layer_names[seen.feeders[norm]]
        for name, norm in tracked_batch_norms(base).items()
        if seen.feeders.get(norm) in layer_names
    }
