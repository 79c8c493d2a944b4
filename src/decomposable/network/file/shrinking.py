"""A network with one of its sizes as the largest: the same in memory, and read from a file with no byte more than that.

`shrink` says what the smaller network consists of. To read one, it is shrunk while its tensors have no content (they
are on the meta device), which takes milliseconds; what is left then says what to read, and how it lies in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from decomposable.core.factors import Factors, memory_format_of
from decomposable.core.forms import to_factors, to_weight
from decomposable.network.calibration.statistics import Statistics
from decomposable.network.file.container import Container, like
from decomposable.network.file.contents import Artifact, factor_names, state_name
from decomposable.network.file.parsing import network_from
from decomposable.network.file.skeleton import StoredLayer, join
from decomposable.network.parts import sliced, truncated
from decomposable.sizing.cost import LayerCost
from decomposable.sizing.latency import LatencyProfile, choose_timed
from decomposable.sizing.plans import RankPlan, SizeRequest
from decomposable.sizing.ranks import RankSelector
from decomposable.sizing.record import NETWORK_FILE


@torch.no_grad()
def shrink(artifact: Artifact, plan: RankPlan) -> Artifact:
    """The network with this size as its largest: the bases that this size does not use are gone, smaller sizes stay.

    The weight of a layer that loses bases becomes W̃. Fractions of MACs and of parameters keep counting from the
    original network.
    """
    artifact.selector.check_plan(plan)
    if plan.is_full:
        return replace(artifact, plan=plan)
    factors = {
        layer.name: _first_bases(artifact.factors[layer.name], plan.ranks[layer.name])
        for layer in artifact.skeleton.layers
    }
    state = {**artifact.state, **statistics_at(artifact, plan)}
    for layer in artifact.skeleton.layers:
        if _is_replaced(artifact, layer, plan):
            weight, whole = artifact.state[layer.key], artifact.factors[layer.name]
            state.update(_weights_at(layer, plan, weight, whole, factors[layer.name]))
    statistics = artifact.statistics
    if statistics is not None:
        statistics = _rows_of(statistics, _rows_needed(artifact, plan), statistics.mean_SC, statistics.var_SC)
    return replace(
        artifact,
        state=state,
        factors=factors,
        selector=_selector_up_to(artifact, plan),
        plan=plan,
        statistics=statistics,
    )


def read_network(container: Container, request: SizeRequest | None = None) -> Artifact:
    """The network of a file; of a size, what `shrink` makes of it.

    Only what the result consists of is read, and the rest of a block here and there to verify it.
    """
    outline = network_from(container)
    if request is None:
        return _filled(container, outline)
    plan = choose_timed(
        outline.selector,
        lambda: LatencyProfile.load_beside(container.path),
        request,
        calibrated=outline.statistics,
        runtime="torch",
        threads=torch.get_num_threads(),
    )
    if plan.is_full:
        return _filled(container, replace(outline, plan=plan))
    return _filled_at(container, outline, plan)


def _filled(container: Container, outline: Artifact) -> Artifact:
    """The same with all its tensors."""
    container.expect_all()
    names = _names_in_file(outline)
    statistics = outline.statistics
    if statistics is not None:
        mean, var = (container.read(f"statistics/{kind}") for kind in ("mean", "var"))
        statistics = replace(statistics, mean_SC=mean, var_SC=var, original=_original(container))
    return replace(
        outline,
        factors={name: _read_factors(container, name) for name in outline.factors},
        state=_read_state(container, outline.state, names, {}),
        statistics=statistics,
    )


@torch.no_grad()
def _filled_at(container: Container, outline: Artifact, plan: RankPlan) -> Artifact:
    """What `shrink` makes of the whole network, without reading the whole."""
    names, smaller = _names_in_file(outline), shrink(outline, plan)
    factors: dict[str, Factors] = {}
    changed: dict[str, Tensor] = {}
    for layer in outline.skeleton.layers:
        part, rank = smaller.factors[layer.name], plan.ranks[layer.name]
        if plan.runs_as(layer.name) != "factors" and _is_replaced(outline, layer, plan):
            # A dense W̃ is the weight less what is dropped, or a sum in the order of the whole: all of it is needed.
            whole, weight = _read_factors(container, layer.name), container.read(names[id(outline.state[layer.key])])
            factors[layer.name] = _first_bases(whole, rank)
            changed.update(_weights_at(layer, plan, weight, whole, factors[layer.name]))
            continue
        factors[layer.name] = _read_factors(container, layer.name, part)
        if _is_replaced(outline, layer, plan):
            changed.update(_weights_at(layer, plan, outline.state[layer.key], part, factors[layer.name]))
    statistics = None
    if outline.statistics is not None:
        statistics = _read_statistics(container, outline.statistics, _rows_needed(outline, plan))
        changed.update(statistics_at(replace(outline, statistics=statistics), plan))
    state = _read_state(container, outline.state, names, changed)
    return replace(smaller, factors=factors, state=state, statistics=statistics)


def _names_in_file(outline: Artifact) -> dict[int, str]:
    """What every tensor of the state is called in the file, by its identity: one that is shared is there once."""
    names: dict[int, str] = {}
    for key, tensor in outline.state.items():
        names.setdefault(id(tensor), state_name(key))
    return names


def _read_state(
    container: Container, state: Mapping[str, Tensor], names: Mapping[int, str], changed: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The state with its content, but for what has changed, which is not read; what is one tensor stays one."""
    read: dict[int, Tensor] = {}
    for key, tensor in state.items():
        if key not in changed and id(tensor) not in read:
            read[id(tensor)] = container.read(names[id(tensor)])
    return {key: changed[key] if key in changed else read[id(tensor)] for key, tensor in state.items()}


def _read_factors(container: Container, name: str, part: Factors | None = None) -> Factors:
    """A layer's factors, or as many bases of them as `part` has, laid out as it is."""
    first, second = factor_names(name)
    if part is None:
        return Factors(container.read(first), container.read(second).movedim(0, 1))
    rank = len(part.first)
    pair = container.read(first, rank), container.read(second, rank).movedim(0, 1)
    return Factors(like(part.first, pair[0]), like(part.second, pair[1]))


def _read_statistics(container: Container, outline: Statistics, rows: list[int]) -> Statistics:
    """The statistics that are left in the end; they lie in the order of the sizes, the small ones first."""
    mean, var = (container.read(f"statistics/{kind}", max(rows) + 1) for kind in ("mean", "var"))
    return _rows_of(replace(outline, original=_original(container)), rows, mean, var)


def _original(container: Container) -> tuple[Tensor, Tensor]:
    mean, var = (container.read(f"{NETWORK_FILE.original}{kind}") for kind in ("mean", "var"))
    return mean, var


def _first_bases(whole: Factors, rank: int) -> Factors:
    if rank == len(whole.first):
        return whole
    part = sliced(whole, rank)
    return Factors(part.first.clone(), part.second.clone())  # lets go of the rest


def _is_replaced(artifact: Artifact, layer: StoredLayer, plan: RankPlan) -> bool:
    """Whether the weight becomes another one: that of a pair is the product of what is kept, whatever it was before."""
    stored = len(artifact.factors[layer.name].first)
    return plan.runs_as(layer.name) == "factors" or plan.ranks[layer.name] < stored


def _weights_at(layer: StoredLayer, plan: RankPlan, weight: Tensor, whole: Factors, part: Factors) -> dict[str, Tensor]:
    """W̃ under all the names that the weight has. Of a pair it is used where a smaller size becomes dense.

    `weight` and `whole` count only where the layer is dense; otherwise their shapes do.
    """
    if plan.runs_as(layer.name) == "factors":
        p_MR, q_RN = to_factors(part.first, part.second, layer.form)
        made = to_weight(p_MR @ q_RN, layer.shape, layer.form).contiguous(memory_format=memory_format_of(weight))
    else:
        made = truncated(weight, whole, layer.form, plan.ranks[layer.name], layer.full_rank)
    return {join(path, "weight"): made for path in layer.paths}


def _selector_up_to(artifact: Artifact, plan: RankPlan) -> RankSelector:
    selector = artifact.selector
    ranks = np.array([plan.ranks[cost.name] for cost in selector.costs], dtype=np.int64)
    upper = np.where(ranks < selector.full_ranks, ranks, selector.upper)
    return replace(selector, lower=np.minimum(selector.lower, upper), upper=upper, stored=ranks)


def _rows_needed(artifact: Artifact, plan: RankPlan) -> list[int]:
    """Which calibrated sizes the statistics of this size and of those within it are made from."""
    assert artifact.statistics is not None
    return artifact.statistics.rows_within(plan, _largest_position(artifact.selector, plan))


def _largest_position(selector: RankSelector, plan: RankPlan) -> float:
    """The largest part of the original that a size with no rank above the plan's can be.

    That is not always the plan itself: which layers are dense depends on what the size was asked for in, and a budget
    of parameters may make one dense that has fewer MACs as two factors.
    """
    in_macs = bool(plan.full_macs)  # as `interpolation.position`
    fixed, full = (selector.fixed_macs or 0, plan.full_macs) if in_macs else (selector.fixed_params, plan.full_params)
    cost = sum(_largest_cost(c, plan.ranks[c.name], c.name in plan.dense, in_macs) for c in selector.costs)
    return (fixed + cost) / (full or 1)


def _largest_cost(layer: LayerCost, rank: int, is_dense: bool, in_macs: bool) -> int:
    """The most that a layer costs with up to so many bases."""
    measures = [(layer.dense_params, layer.params_per_rank)]
    if in_macs:
        measures.append((layer.dense_macs, layer.macs_per_rank))
    dense, per_rank = measures[-1]
    costs = [dense if is_dense else rank * per_rank]
    for whole, each in measures:  # two factors are taken as long as they are not more than the whole
        largest_pair = min(rank, layer.full_rank - 1, whole // each if each else rank)
        costs.append(largest_pair * per_rank)
        if largest_pair < rank:
            costs.append(dense)
    return max(costs)


def _rows_of(statistics: Statistics, rows: list[int], mean_SC: Tensor, var_SC: Tensor) -> Statistics:
    return replace(
        statistics,
        positions=tuple(statistics.positions[i] for i in rows),
        plans=tuple(statistics.plans[i] for i in rows),
        mean_SC=mean_SC[rows],
        var_SC=var_SC[rows],
    )


def statistics_at(artifact: Artifact, plan: RankPlan) -> dict[str, Tensor]:
    """The buffers of batch normalisation that are this size's own, by their keys in the state dict."""
    found = artifact.statistics.at(plan) if artifact.statistics is not None else None
    buffers = {
        join(name, kind): tensor
        for name, pair in (found or {}).items()
        for kind, tensor in zip(("running_mean", "running_var"), pair, strict=True)
    }
    by_tensor = {id(artifact.state[key]): tensor for key, tensor in reversed(buffers.items())}
    # A module that stands in two places of the tree has two keys, one of which the statistics name.
    aliases = {key: by_tensor[id(tensor)] for key, tensor in artifact.state.items() if id(tensor) in by_tensor}
    return {**aliases, **buffers}
