"""The one file that holds a decomposed network at every size, and what can be done with it without its model.

    net ── save ──▶ file ─┬─ load ──▶ net
                          └─ read ──▶ Artifact ─┬─ size_state_dict, save_size ──▶ one size, plain
                                                └─ shrink ──▶ Artifact, smaller ── save ──▶ file

`load` and `read` take a size, too. Then they give what `shrink` gives, and read no byte more than that consists of: the
rest of the file are shapes (tensors on the meta device). `docs/artifact.md` describes the format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from decomposable.core.factors import Factors
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.file.container import Container, FilePath, Stored, like, open_container, write_container
from decomposable.network.file.contents import (
    Artifact,
    StoredLayer,
    chain_around,
    describe_size,
    join,
    with_last_swapped,
)
from decomposable.network.file.parsing import kind_of, naming, network_from
from decomposable.network.parts import LayerBases, Tuned
from decomposable_edge.device_graph import GRAPH, DeviceGraph
from decomposable_edge.errors import ArtifactError
from decomposable_edge.realising import dense_weight, realised, statistics_at
from decomposable_edge.sizing.chain import Ranks, ranks_of
from decomposable_edge.sizing.cost import LayerCost
from decomposable_edge.sizing.latency import LatencyProfile
from decomposable_edge.sizing.plans import RankPlan, SizeKeywords, SizeRequest
from decomposable_edge.sizing.record import check_tuned, factor_names, state_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Artifact", "outline", "read", "save_size", "shrink", "size_state_dict"]


def read(path: FilePath, **size: Unpack[SizeKeywords]) -> Artifact:
    """Return what a file of `DecomposedNet.save` holds, without the model's code; `selector` chooses a size of it.

    With a size, given as to `resize_`, only that size and all smaller ones are read: what `shrink` makes of the whole.
    """
    request = SizeRequest.of("read", size)
    with open_container(path) as container, naming(path):
        _require_network(path, container)
        return read_network(container, request if request.given() else None)


def outline(path: FilePath) -> Artifact:
    """Return what a file of `DecomposedNet.save` says of its sizes: as `read`, but without the content of tensors.

    Factors, state and statistics are not read; they are on the meta device.
    """
    with open_container(path) as container, naming(path):
        _require_network(path, container)
        return network_from(container)


def _require_network(path: FilePath, container: Container) -> None:
    if kind_of(path, container.description) != "network":
        allowed = "the network file that it was made from (decomposable.load(path, model=...) takes this one)"
        raise ArtifactError.of(path, f"it holds one size only; allowed: {allowed}")


@torch.no_grad()
def size_state_dict(artifact: Artifact, plan: RankPlan) -> dict[str, Tensor]:
    """Return what ``extract().state_dict()`` of the network at this size is: the same keys and values in this order.

    >>> import decomposable as dn
    >>> from torch import nn
    >>> net = dn.decompose(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> list(size_state_dict(net.artifact(), net.plan(ranks={"0": 3})))
    ['0.0.weight', '0.1.weight', '0.1.bias', '2.weight', '2.bias']
    """
    artifact.selector.check_plan(plan)
    bases = {layer.name: bases_of(artifact, layer) for layer in artifact.skeleton.layers}
    size = realised(plan, bases, artifact.statistics, None)
    changed = {**size.statistics, **tuned_at(artifact, artifact.tuned, plan)}
    chains: dict[str, Factors] = {}
    for layer in artifact.skeleton.layers:
        found = size.layers[layer.name]
        if found.runs_as == "factors":
            chains.update(dict.fromkeys(layer.paths, found.weights))
        elif found.runs_as == "dense":
            changed[layer.key] = found.weights[0]
    changed = under_all_names(artifact, changed)
    result: dict[str, Tensor] = {}
    for key, tensor in artifact.state.items():
        path = chain_around(key, chains)
        if path is None:
            result[key] = changed.get(key, tensor)
        elif join(path, "0.weight") not in result:  # all of the chain at once; the dense layer has nothing else
            result |= {join(path, f"{i}.weight"): weight for i, weight in enumerate(chains[path])}
            bias = join(path, "bias")
            if bias in artifact.state:
                result[join(path, f"{len(chains[path]) - 1}.bias")] = changed.get(bias, artifact.state[bias])
    copies: dict[int, Tensor] = {}  # what is one tensor stays one
    return {key: copies.setdefault(id(tensor), tensor.detach().clone()) for key, tensor in result.items()}


def save_size(
    source: Artifact | DecomposedNet, plan: RankPlan, path: FilePath, info: Mapping[str, Any] | None = None
) -> None:
    """Write one size as a plain state dict: ``safetensors.torch.load_file`` reads it, and `load` makes the module.

    Tensors that layers share are written for each of them. `info` takes the place of the network's own.
    """
    artifact = source if isinstance(source, Artifact) else source.artifact()
    tensors = size_state_dict(artifact, plan)
    write_container(path, describe_size(artifact, plan, tensors, artifact.info if info is None else info), tensors)


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

    Nothing else is read, but the rest of a block here and there to verify it.
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
    selector, by_macs = artifact.selector, bool(plan.full_macs)  # as `interpolation.position`
    measures = ("macs", "params") if by_macs else ("params",)
    fixed, full = (selector.fixed_macs or 0, plan.full_macs) if by_macs else (selector.fixed_params, plan.full_params)
    ranks = plan.ranks
    cost = sum(_largest_cost(c, ranks_of(ranks[c.name]), c.name in plan.dense, measures) for c in selector.costs)
    return (fixed + cost) / (full or 1)


def _largest_cost(layer: LayerCost, ranks: Ranks, is_dense: bool, measures: Sequence[str]) -> int:
    """Return the most that a layer costs, by the first measure, with up to so many bases; or a little more.

    A chain is taken where it costs no more than the dense layer, by the measure that a size was asked for in.
    """
    by = measures[0]
    costs = [layer.dense(by)] if is_dense else []
    for measure in measures:
        taken, most = ranks, layer.dense(measure)
        if layer.chain(measure, ranks) > most:
            costs.append(layer.dense(by))
            if len(ranks) == 1:
                taken = (most // layer.chain(measure, (1,)),)
        costs.append(layer.chain(by, taken))
    return max(costs)


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
