"""A network with one of its sizes as the largest: the same in memory, and read from a file with no byte more than that.

`shrink` says what the smaller network consists of. It takes that from memory, or from a file whose tensors are read
when they are taken; what is known of a file before that are shapes (tensors on the meta device).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from decomposable.core.factors import Factors
from decomposable.network.calibration.statistics import InTorch
from decomposable.network.file.container import Container, Stored, like
from decomposable.network.file.contents import Artifact, as_stored, from_stored
from decomposable.network.file.parsing import network_from
from decomposable.network.file.skeleton import StoredLayer
from decomposable.network.parts import LayerBases
from decomposable.network.tuned import Tuned
from decomposable_edge.device_graph import GRAPH, DeviceGraph
from decomposable_edge.realising import dense_weight, statistics_at
from decomposable_edge.sizing.chain import Ranks, ranks_of
from decomposable_edge.sizing.cost import LayerCost
from decomposable_edge.sizing.interpolation import KnownSizes
from decomposable_edge.sizing.latency import LatencyProfile
from decomposable_edge.sizing.plans import RankPlan, SizeRequest
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.record import check_tuned, factor_names, state_name

K = TypeVar("K", bound=InTorch)


def bases_of(artifact: Artifact, layer: StoredLayer) -> LayerBases:
    """Return a layer's weight and factors."""
    return LayerBases(layer.chain, artifact.factors[layer.name], artifact.state[layer.key])


class InFile:
    """A network in a file, whose tensors are read when they are taken; `artifact` has their shapes."""

    def __init__(self, container: Container) -> None:
        self.artifact = network_from(container)
        self._container, self._read = container, dict[int, Tensor]()
        self._names: dict[int, str] = {}  # what is one tensor is in the file once
        for key, tensor in self.artifact.state.items():
            self._names.setdefault(id(tensor), state_name(key))

    def tensor(self, key: str) -> Tensor:
        """Return a tensor of the state."""
        place = id(self.artifact.state[key])
        if place not in self._read:
            self._read[place] = self._container.tensors[self._names[place]].all()
        return self._read[place]

    def bases(self, layer: StoredLayer) -> LayerBases:
        """Return a layer's weight and factors."""
        return _BasesInFile(**vars(bases_of(self.artifact, layer)), source=self, layer=layer)

    def factors(self, layer: StoredLayer, start: int, like_these: Factors) -> Factors:
        """Return the factors from a basis on, as many as these are, and laid out as they are."""
        pairs = zip(factor_names(layer), as_stored(like_these), strict=True)
        rows = [self._container.tensors[n][start : start + len(each)][:, : each.shape[1]] for n, each in pairs]
        return tuple(like(each.stride(), found) for each, found in zip(like_these, from_stored(rows), strict=True))

    def whole(self, plan: RankPlan) -> Artifact:
        """Return all of it, at the size of a plan."""
        self._container.expect_all()
        found = self.artifact
        return replace(
            found,
            plan=plan,
            state={key: self.tensor(key) for key in found.state},
            factors={x.name: self.factors(x, 0, found.factors[x.name]) for x in found.skeleton.layers},
            statistics=None if found.statistics is None else found.statistics.map(_in_memory),
            tuned=None if found.tuned is None else _checked(found.tuned.map(_in_memory)),
            graph=self.graph(),
        )

    def graph(self) -> DeviceGraph | None:
        """Return the graph for devices, if there is one."""
        about, tensors = self._container.description.get("onnx"), self._container.tensors
        return None if about is None else DeviceGraph.read(about, tensors[GRAPH].all().numpy().tobytes())


def _in_memory(tensor: Tensor | Stored) -> Tensor:
    return tensor if isinstance(tensor, Tensor) else tensor.all()


@dataclass(frozen=True, eq=False)
class _BasesInFile(LayerBases):
    source: InFile
    layer: StoredLayer

    def weight(self) -> Tensor:
        return self.source.tensor(self.layer.key)

    def first(self, ranks: Ranks) -> Factors:
        return self.source.factors(self.layer, 0, super().first(ranks))

    def beyond(self, rank: int) -> Factors:
        return self.source.factors(self.layer, rank, super().beyond(rank))


def read_network(container: Container, request: SizeRequest | None = None) -> Artifact:
    """The network of a file; of a size, what `shrink` makes of it.

    Only what the result consists of is read, and the rest of a block here and there to verify it.
    """
    source = InFile(container)
    plan = source.artifact.plan
    if request is not None:
        plan = source.artifact.plan_for(request, lambda: LatencyProfile.load_beside(container.path))
    if request is None or plan.is_full:
        return source.whole(plan)
    return replace(_shrunk(source.artifact, plan, source.bases, source.tensor), graph=source.graph())


def shrink(artifact: Artifact, plan: RankPlan) -> Artifact:
    """The network with this size as its largest: the bases that this size does not use are gone, smaller sizes stay.

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
    """The same, with what a layer and the state hold taken from memory or from a file."""
    selector = artifact.selector
    factors: dict[str, Factors] = {}
    changed: dict[str, Tensor] = {}
    for layer in artifact.skeleton.layers:
        bases, ranks = bases_of_layer(layer), ranks_of(plan.ranks[layer.name])
        part = bases.first(ranks)
        factors[layer.name] = (
            part if ranks == bases.kept else tuple(each.clone() for each in part)
        )  # lets go of the rest
        # The weight of a chain is the product of what is kept, whatever it was before.
        if plan.runs_as(layer.name) == "factors":
            changed[layer.key] = bases.joined(part)
        elif ranks != bases.kept:
            changed[layer.key] = dense_weight(bases, ranks)
    statistics = _within(artifact.statistics, selector, plan)
    tuned = _checked(_within(artifact.tuned, selector, plan))
    changed |= statistics_at(plan, statistics) | tuned_at(artifact, tuned, plan)
    everywhere = under_all_names(artifact, changed)
    return replace(
        artifact,
        state={key: everywhere[key] if key in everywhere else tensor(key) for key in artifact.state},
        factors=factors,
        selector=_selector_up_to(selector, plan),
        plan=plan,
        statistics=statistics,
        tuned=tuned,
    )


def _within(known: K | None, selector: RankSelector, plan: RankPlan) -> K | None:
    """What is known of the sizes within a plan: the rows that these are interpolated from."""
    return None if known is None else known.of_rows(_rows_needed(known, selector, plan))


def _checked(tuned: Tuned | None) -> Tuned | None:
    if tuned is not None:
        check_tuned(all(bool(torch.isfinite(t).all()) for t in (tuned.values_ST, *tuned.original)))
    return tuned


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


def tuned_at(artifact: Artifact, tuned: Tuned | None, plan: RankPlan) -> dict[str, Tensor]:
    """The vectors that are this size's own, by their keys in the state dict."""
    found = {} if tuned is None else tuned.interpolated(plan)[0]
    return {key: values.view(artifact.state[key].shape).to(artifact.state[key].dtype) for key, values in found.items()}


def under_all_names(artifact: Artifact, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These tensors by all keys that the state has for them.

    A module or parameter that stands in two places of the tree has two keys, one of which is named.
    """
    by_tensor = {id(artifact.state[key]): tensor for key, tensor in tensors.items() if key in artifact.state}
    return {key: by_tensor[id(tensor)] for key, tensor in artifact.state.items() if id(tensor) in by_tensor}
