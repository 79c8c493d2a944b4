"""A network with one of its sizes as the largest: the same in memory, and read from a file with no byte more than that.

`shrink` says what the smaller network consists of. To read one, it is shrunk while its tensors have no content (they
are on the meta device), which takes milliseconds; what is left then says what to read, and how it lies in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from decomposable.core.factors import Factors, memory_format_of
from decomposable.network.calibration.statistics import InTorch
from decomposable.network.file.container import Container, like
from decomposable.network.file.contents import Artifact, as_stored, factor_names, from_stored, state_name
from decomposable.network.file.parsing import network_from
from decomposable.network.file.skeleton import StoredLayer, join
from decomposable.network.parts import dense, kept_ranks, sliced, truncated
from decomposable_edge.sizing.chain import Ranks, ranks_of
from decomposable_edge.sizing.cost import LayerCost
from decomposable_edge.sizing.interpolation import KnownSizes
from decomposable_edge.sizing.latency import LatencyProfile
from decomposable_edge.sizing.plans import RankPlan, RunsAs, SizeRequest
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.record import NETWORK_FILE, check_tuned

K = TypeVar("K", bound=InTorch)


@torch.no_grad()
def shrink(artifact: Artifact, plan: RankPlan) -> Artifact:
    """The network with this size as its largest: the bases that this size does not use are gone, smaller sizes stay.

    The weight of a layer that loses bases becomes W̃. Fractions of MACs and of parameters keep counting from the
    original network.
    """
    artifact.selector.check_plan(plan)
    if plan.is_full:
        return replace(artifact, plan=plan)
    factors: dict[str, Factors] = {}
    state = {**artifact.state, **statistics_at(artifact, plan), **tuned_at(artifact, plan)}
    for layer in artifact.skeleton.layers:
        whole, ranks, runs_as = artifact.factors[layer.name], ranks_of(plan.ranks[layer.name]), plan.runs_as(layer.name)
        part = factors[layer.name] = _first_bases(whole, ranks)
        # The weight of a chain is the product of what is kept, whatever it was before.
        if runs_as == "factors" or ranks != kept_ranks(whole):
            state.update(_weights_at(layer, runs_as, artifact.state[layer.key], whole, part))
    statistics, tuned = artifact.statistics, artifact.tuned
    if statistics is not None:
        statistics = statistics.of_rows(_rows_needed(statistics, artifact.selector, plan))
    if tuned is not None:
        tuned = tuned.of_rows(_rows_needed(tuned, artifact.selector, plan))
    selector = _selector_up_to(artifact.selector, plan)
    return replace(
        artifact, state=state, factors=factors, selector=selector, plan=plan, statistics=statistics, tuned=tuned
    )


def read_network(container: Container, request: SizeRequest | None = None) -> Artifact:
    """The network of a file; of a size, what `shrink` makes of it.

    Only what the result consists of is read, and the rest of a block here and there to verify it.
    """
    outline = network_from(container)
    if request is None:
        return _filled(container, outline, outline)
    plan = outline.plan_for(request, lambda: LatencyProfile.load_beside(container.path))
    return shrink(_filled(container, outline, shrink(outline, plan)), plan)


@torch.no_grad()
def _filled(container: Container, outline: Artifact, smaller: Artifact) -> Artifact:
    """The outline with the content that `smaller`, which it becomes, has of it; what that makes anew has none."""
    is_whole, plan = smaller.state is outline.state, smaller.plan
    if is_whole:
        container.expect_all()
    names: dict[int, str] = {}  # in the file; what is one tensor is there once
    for key, tensor in outline.state.items():
        names.setdefault(id(tensor), state_name(key))
    kept = {id(tensor) for key, tensor in outline.state.items() if smaller.state[key] is tensor}
    read = {place: container.read(name) for place, name in names.items() if place in kept}
    factors: dict[str, Factors] = {}
    made: dict[str, Tensor] = {}
    for layer in outline.skeleton.layers:
        part, weight, runs_as = smaller.factors[layer.name], outline.state[layer.key], plan.runs_as(layer.name)
        if runs_as == "factors" or smaller.state[layer.key] is weight:
            factors[layer.name] = _read_factors(container, layer, part)
            continue
        # A dense W̃ is the weight less what is dropped, or a sum in the order of the whole: all of it is needed.
        whole = _read_factors(container, layer, outline.factors[layer.name])
        factors[layer.name] = _first_bases(whole, kept_ranks(part))
        made.update(_weights_at(layer, runs_as, container.read(names[id(weight)]), whole, factors[layer.name]))
    statistics, tuned = outline.statistics, outline.tuned
    rows = None if is_whole else plan
    if statistics is not None:
        places = [[f"{begin}{kind}" for kind in ("mean", "var")] for begin in ("statistics/", NETWORK_FILE.original)]
        statistics = _read_known(container, statistics, outline.selector, rows, *places)
    if tuned is not None:
        tuned = _read_known(container, tuned, outline.selector, rows, ["tuned/values"], ["tuned/original"])
        check_tuned(all(bool(torch.isfinite(t).all()) for t in (tuned.values_ST, *tuned.original)))
    state = {key: made[key] if key in made else read.get(id(t), t) for key, t in outline.state.items()}
    return replace(outline, factors=factors, state=state, statistics=statistics, tuned=tuned)


def _read_known(
    container: Container,
    known: K,
    selector: RankSelector,
    plan: RankPlan | None,
    tables: Sequence[str],
    original: Sequence[str],
) -> K:
    """What is known of sizes, with its content; of a plan, as far as it needs: the rows of small sizes lie first."""
    stop = None if plan is None else max(_rows_needed(known, selector, plan)) + 1
    read: dict[str, Any] = {field: container.read(name, stop) for field, name in zip(known.tables, tables, strict=True)}
    ends = tuple(container.read(name) for name in original)
    return replace(known, positions=known.positions[:stop], plans=known.plans[:stop], **read, original=ends)


def _read_factors(container: Container, layer: StoredLayer, part: Factors) -> Factors:
    """As many bases of a layer's factors as `part` has, laid out as it is."""
    pairs = zip(factor_names(layer), as_stored(part), strict=True)
    rows = from_stored([container.read(name, len(each))[:, : each.shape[1]] for name, each in pairs])
    return tuple(like(each, found) for each, found in zip(part, rows, strict=True))


def _first_bases(whole: Factors, ranks: Ranks) -> Factors:
    if ranks == kept_ranks(whole):
        return whole
    return tuple(part.clone() for part in sliced(whole, ranks))  # lets go of the rest


def _weights_at(
    layer: StoredLayer, runs_as: RunsAs, weight: Tensor, whole: Factors, part: Factors
) -> dict[str, Tensor]:
    """W̃ under all the names that the weight has. Of a chain it is used where a smaller size becomes dense.

    `weight` and `whole` count only where the layer is dense; otherwise their shapes do.
    """
    if runs_as == "factors":
        made = dense(part, layer.chain, memory_format_of(weight))
    else:
        made = truncated(weight, whole, kept_ranks(part), layer.chain)
    return {join(path, "weight"): made for path in layer.paths}


def _selector_up_to(selector: RankSelector, plan: RankPlan) -> RankSelector:
    ranks = selector.as_array(plan.ranks)
    upper = np.where(ranks < selector.full_ranks, ranks, selector.upper)
    return replace(selector, lower=np.minimum(selector.lower, upper), upper=upper, stored=ranks)


def _rows_needed(known: KnownSizes, selector: RankSelector, plan: RankPlan) -> list[int]:
    """Which of these sizes the numbers of this size and of those within it are made from.

    The largest size with no rank above the plan's is not always the plan itself: which layers are dense depends on what
    the size was asked for in, and a budget of parameters may make one dense that has fewer MACs as a chain.
    """
    in_macs = bool(plan.full_macs)  # as `interpolation.position`
    fixed, full = (selector.fixed_macs or 0, plan.full_macs) if in_macs else (selector.fixed_params, plan.full_params)
    cost = sum(_largest_cost(c, ranks_of(plan.ranks[c.name]), c.name in plan.dense, in_macs) for c in selector.costs)
    return known.rows_within(plan, (fixed + cost) / (full or 1))


def _largest_cost(layer: LayerCost, ranks: Ranks, is_dense: bool, in_macs: bool) -> int:
    """The most that a layer costs with up to so many bases, or a little more."""
    by = "macs" if in_macs else "params"
    costs = [layer.dense(by) if is_dense else layer.chain(by, ranks)]
    for measure in ("params", "macs") if in_macs else ("params",):
        largest = _largest_chain(layer, ranks, measure)
        costs.append(layer.chain(by, largest or ranks))
        if largest != ranks:
            costs.append(layer.dense(by))
    return max(costs)


def _largest_chain(layer: LayerCost, ranks: Ranks, measure: str) -> Ranks | None:
    """Of so many bases those of the largest chain that is taken: one that costs no more than the dense layer, and is
    not all of it. With several cuts there is no one such chain, where that of them all costs more: None.
    """
    if len(ranks) > 1:
        is_taken = ranks != layer.full_ranks and layer.chain(measure, ranks) <= layer.dense(measure)
        return ranks if is_taken else None
    each = layer.chain(measure, (1,))
    most = layer.dense(measure) // each if each else ranks[0]
    return (min(ranks[0], layer.full_ranks[0] - 1, most),)


def statistics_at(artifact: Artifact, plan: RankPlan) -> dict[str, Tensor]:
    """The buffers of batch normalisation that are this size's own, by their keys in the state dict."""
    found = artifact.statistics.at(plan) if artifact.statistics is not None else None
    buffers = {
        join(name, kind): tensor
        for name, pair in (found or {}).items()
        for kind, tensor in zip(("running_mean", "running_var"), pair, strict=True)
    }
    return {**_under_all_names(artifact, buffers), **buffers}


def tuned_at(artifact: Artifact, plan: RankPlan) -> dict[str, Tensor]:
    """The vectors that are this size's own, by their keys in the state dict."""
    if artifact.tuned is None:
        return {}
    tuned = {key: (artifact.state[key], values) for key, values in artifact.tuned.at(plan).items()}
    return _under_all_names(artifact, {key: v.view(own.shape).to(own.dtype) for key, (own, v) in tuned.items()})


def _under_all_names(artifact: Artifact, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These tensors by all keys that the state has for them.

    A module or parameter that stands in two places of the tree has two keys, one of which is named.
    """
    by_tensor = {id(artifact.state[key]): tensor for key, tensor in reversed(list(tensors.items()))}
    return {key: by_tensor[id(tensor)] for key, tensor in artifact.state.items() if id(tensor) in by_tensor}
