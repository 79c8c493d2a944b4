"""A network with one of its sizes as the largest: the same in memory, and read from a file with no byte more than that.

`shrink` says what the smaller network consists of. It takes that from memory, or from a file whose tensors are read
when they are taken; what is known of a file before that are shapes (tensors on the meta device).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from decomposable.core.factors import Factors
from decomposable.network.file.container import Container, Stored, like
from decomposable.network.file.contents import Artifact, with_last_swapped
from decomposable.network.file.parsing import network_from
from decomposable.network.file.skeleton import StoredLayer
from decomposable.network.parts import LayerBases, Tuned
from decomposable_edge.device_graph import GRAPH, DeviceGraph
from decomposable_edge.realising import dense_weight, statistics_at
from decomposable_edge.sizing.chain import Ranks, ranks_of
from decomposable_edge.sizing.cost import LayerCost
from decomposable_edge.sizing.latency import LatencyProfile
from decomposable_edge.sizing.plans import RankPlan, SizeRequest
from decomposable_edge.sizing.ranks import Measure
from decomposable_edge.sizing.record import check_tuned, factor_names, state_name


def bases_of(artifact: Artifact, layer: StoredLayer) -> LayerBases:
    """Return a layer's weight and factors."""
    return LayerBases(layer.chain, artifact.factors[layer.name], artifact.state[layer.key])


class _InFile:
    """A network in a file, whose tensors are read when they are taken; `artifact` has their shapes."""

    def __init__(self, container: Container) -> None:
        self.artifact = network_from(container)
        self.container, self._read = container, dict[int, Tensor]()
        self._names: dict[int, str] = {}  # what is one tensor is in the file once
        for key, tensor in self.artifact.state.items():
            self._names.setdefault(id(tensor), state_name(key))

    def tensor(self, key: str) -> Tensor:
        """Return a tensor of the state."""
        place = id(self.artifact.state[key])
        if place not in self._read:
            self._read[place] = self.container.tensors[self._names[place]].all()
        return self._read[place]

    def bases(self, layer: StoredLayer) -> LayerBases:
        """Return a layer's weight and factors."""
        return _BasesInFile(**vars(bases_of(self.artifact, layer)), source=self, layer=layer)

    def factors(self, layer: StoredLayer, start: int, like_these: Factors) -> Factors:
        """Return the factors from a basis on, as many as these are, and laid out as they are."""
        pairs = zip(factor_names(layer), with_last_swapped(like_these), strict=True)
        rows = [self.container.tensors[n][start : start + len(each)][:, : each.shape[1]] for n, each in pairs]
        read = zip(like_these, with_last_swapped(rows), strict=True)
        return tuple(like(each.stride(), found) for each, found in read)

    def whole(self, plan: RankPlan) -> Artifact:
        """Return all of it, at the size of a plan."""
        self.container.expect_all()
        found = self.artifact
        return replace(
            found,
            plan=plan,
            state={key: self.tensor(key) for key in found.state},
            factors={x.name: self.factors(x, 0, found.factors[x.name]) for x in found.skeleton.layers},
            statistics=found.statistics and found.statistics.map(_in_memory),
            tuned=_checked(found.tuned and found.tuned.map(_in_memory)),
        )


@dataclass(frozen=True, eq=False)
class _BasesInFile(LayerBases):
    source: _InFile
    layer: StoredLayer

    def weight(self) -> Tensor:
        return self.source.tensor(self.layer.key)

    def first(self, ranks: Ranks) -> Factors:
        return self.source.factors(self.layer, 0, super().first(ranks))

    def beyond(self, rank: int) -> Factors:
        return self.source.factors(self.layer, rank, super().beyond(rank))


def _in_memory(tensor: Tensor | Stored) -> Tensor:
    return tensor if isinstance(tensor, Tensor) else tensor.all()


def _checked(tuned: Tuned | None) -> Tuned | None:
    if tuned is not None:
        check_tuned(all(bool(torch.isfinite(t).all()) for t in (tuned.values_ST, *tuned.original)))
    return tuned


def read_network(container: Container, request: SizeRequest | None = None) -> Artifact:
    """Return the network of a file; of a size, what `shrink` makes of it.

    Only what the result consists of is read, and the rest of a block here and there to verify it.
    """
    source = _InFile(container)
    plan = source.artifact.plan
    if request is not None:
        plan = source.artifact.plan_for(request, lambda: LatencyProfile.load_beside(container.path))
    if request is None or plan.is_full:
        found = source.whole(plan)
    else:
        found = _shrunk(source.artifact, plan, source.bases, source.tensor)
    about = container.description.get("onnx")
    graph = about and DeviceGraph.read(about, container.tensors[GRAPH].all().numpy().tobytes())
    return replace(found, graph=graph)


def shrink(artifact: Artifact, plan: RankPlan) -> Artifact:
    """Return the network with this size as its largest: bases that it does not use are gone, smaller sizes stay.

    The weight of a layer that loses bases becomes W̃. Fractions of MACs and of parameters keep counting from the
    original network.
    """
    artifact.selector.check_plan(plan)
    if plan.is_full:
        return replace(artifact, plan=plan)
    return _shrunk(artifact, plan, partial(bases_of, artifact), artifact.state.__getitem__)


@torch.no_grad()
def _shrunk(
    artifact: Artifact,
    plan: RankPlan,
    bases_of_layer: Callable[[StoredLayer], LayerBases],
    tensor: Callable[[str], Tensor],
) -> Artifact:
    """Do that, with what a layer and the state hold taken from memory or from a file."""
    factors: dict[str, Factors] = {}
    changed: dict[str, Tensor] = {}
    for layer in artifact.skeleton.layers:
        bases, ranks = bases_of_layer(layer), ranks_of(plan.ranks[layer.name])
        part, is_less = bases.first(ranks), ranks != bases.kept
        factors[layer.name] = tuple(each.clone() for each in part) if is_less else part  # lets go of the rest
        # The weight of a chain is the product of what is kept, whatever it was before.
        if plan.runs_as(layer.name) == "factors":
            changed[layer.key] = bases.joined(part)
        elif is_less:
            changed[layer.key] = dense_weight(bases, ranks)
    largest = _largest_position(artifact, plan)
    statistics, tuned = artifact.statistics, artifact.tuned
    statistics = statistics and statistics.of_rows(statistics.rows_within(plan, largest))
    tuned = _checked(tuned and tuned.of_rows(tuned.rows_within(plan, largest)))
    changed |= statistics_at(plan, statistics) | tuned_at(artifact, tuned, plan)
    everywhere = under_all_names(artifact, changed)
    selector, ranks_L = artifact.selector, artifact.selector.as_array(plan.ranks)
    upper_L = np.where(ranks_L < selector.full_ranks, ranks_L, selector.upper)
    return replace(
        artifact,
        state={key: everywhere[key] if key in everywhere else tensor(key) for key in artifact.state},
        factors=factors,
        selector=replace(selector, lower=np.minimum(selector.lower, upper_L), upper=upper_L, stored=ranks_L),
        plan=plan,
        statistics=statistics,
        tuned=tuned,
    )


def _largest_position(artifact: Artifact, plan: RankPlan) -> float:
    """Return a bound for where the largest size with no rank above the plan's lies between nothing and the original.

    That is not always the plan itself: which layers are dense depends on what the size was asked for in, and a budget
    of parameters may make one dense that has fewer MACs as a chain.
    """
    selector, by = artifact.selector, "macs" if plan.full_macs else "params"  # as `interpolation.position`
    fixed = (selector.fixed_macs or 0) if plan.full_macs else selector.fixed_params
    cost = sum(_largest_cost(c, ranks_of(plan.ranks[c.name]), c.name in plan.dense, by) for c in selector.costs)
    return (fixed + cost) / (plan.full_macs or plan.full_params or 1)


def _largest_cost(layer: LayerCost, ranks: Ranks, is_dense: bool, by: Measure) -> int:
    """Return the most that a layer costs with up to so many bases, or a little more."""
    costs = [layer.dense(by) if is_dense else layer.chain(by, ranks)]
    measures: tuple[Measure, ...] = ("params", "macs") if by == "macs" else ("params",)
    for measure in measures:
        largest = _largest_chain(layer, ranks, measure)
        costs.append(layer.chain(by, largest or ranks))
        if largest != ranks:
            costs.append(layer.dense(by))
    return max(costs)


def _largest_chain(layer: LayerCost, ranks: Ranks, measure: Measure) -> Ranks | None:
    """Return, of so many bases, those of the largest chain that is taken: one that costs no more than the dense layer,
    and is not all of it. With several cuts there is no one such chain, where that of them all costs more: None.
    """
    if len(ranks) > 1:
        is_taken = ranks != layer.full_ranks and layer.chain(measure, ranks) <= layer.dense(measure)
        return ranks if is_taken else None
    each = layer.chain(measure, (1,))
    most = layer.dense(measure) // each if each else ranks[0]
    return (min(ranks[0], layer.full_ranks[0] - 1, most),)


def tuned_at(artifact: Artifact, tuned: Tuned | None, plan: RankPlan) -> dict[str, Tensor]:
    """Return the vectors that are this size's own, by their keys in the state dict."""
    found = {} if tuned is None else tuned.interpolated(plan)[0]
    return {key: values.view(artifact.state[key].shape).to(artifact.state[key].dtype) for key, values in found.items()}


def under_all_names(artifact: Artifact, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return these tensors by all keys that the state has for them.

    A module or parameter that stands in two places of the tree has two keys, one of which is named.
    """
    by_tensor = {id(artifact.state[key]): tensor for key, tensor in tensors.items() if key in artifact.state}
    return {key: by_tensor[id(tensor)] for key, tensor in artifact.state.items() if id(tensor) in by_tensor}
