"""The one file that holds a decomposed network at every size, and what can be done with it without its model.

    net ── save ──▶ file ─┬─ load ──▶ net
                          └─ read ──▶ Artifact ─┬─ size_state_dict, save_size ──▶ one size, plain
                                                └─ shrink ──▶ Artifact, smaller ── save ──▶ file

`docs/artifact.md` describes the format; `contents.py` writes it, `parsing.py` reads it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decomposable.calibration import Statistics
from decomposable.errors import ArtifactError, InvalidArgumentError
from decomposable.factors import Factors
from decomposable.interpolation import position
from decomposable.loading import load
from decomposable.network import DecomposedNet
from decomposable.parts import sliced, stored_ranks, truncated, with_stored
from decomposable.ranks import RankPlan
from decomposable.storage.container import read_container, write_container
from decomposable.storage.contents import Artifact, describe_size
from decomposable.storage.parsing import kind_of, naming, network_from
from decomposable.storage.skeleton import join, pair_around

__all__ = ["Artifact", "load", "read", "save_size", "shrink", "size_state_dict"]


def read(path: str | os.PathLike[str]) -> Artifact:
    """What a file of `DecomposedNet.save` holds, without the model's code; `selector` chooses a size of it."""
    description, tensors = read_container(path)
    kind = kind_of(path, description)
    if kind == "sized":
        raise ArtifactError(
            f"{path}: holds the sizes of the method {description.get('method')!r:.40}, which are not decomposed; in "
            "Python: net = decomposable.load(path, model=...); net.resize_(macs=...); net.extract()"
        )
    if kind != "network":
        raise ArtifactError(
            f"{path}: holds one size only: decomposable.load(path, model=...) takes it in Python; here it takes "
            "the network file that it was made from"
        )
    with naming(path):
        return network_from(description, tensors)


@torch.no_grad()
def size_state_dict(artifact: Artifact, plan: RankPlan) -> dict[str, Tensor]:
    """What ``extract().state_dict()`` of the network at this size is: the same keys and values, in the same order.

    >>> import decomposable as dn
    >>> from torch import nn
    >>> net = dn.decompose(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> artifact = net.artifact()
    >>> list(size_state_dict(artifact, artifact.selector.choose(ranks={"0": 3})))
    ['0.0.weight', '0.1.weight', '0.1.bias', '2.weight', '2.bias']
    """
    check_plan(artifact, plan)
    changed = _statistics_at(artifact, plan)
    pairs: dict[str, Factors] = {}
    for layer, cost in zip(artifact.skeleton.layers, artifact.selector.costs, strict=True):
        rank, factors = plan.ranks[layer.name], artifact.factors[layer.name]
        if rank == cost.full_rank:
            continue  # the original dense layer
        if layer.name in plan.dense:
            weight = truncated(artifact.state[layer.key], factors, layer.form, rank, cost.full_rank)
            changed.update({join(path, "weight"): weight for path in layer.paths})
        else:
            pairs.update(dict.fromkeys(layer.paths, sliced(factors, rank)))
    result: dict[str, Tensor] = {}
    for key, tensor in artifact.state.items():
        path = pair_around(key, pairs)
        if path is None:
            result[key] = changed.get(key, tensor)
        elif join(path, "0.weight") not in result:  # all of the pair at once; the dense layer has nothing else
            result[join(path, "0.weight")], result[join(path, "1.weight")] = pairs[path].first, pairs[path].second
            if join(path, "bias") in artifact.state:
                result[join(path, "1.bias")] = artifact.state[join(path, "bias")]
    copies: dict[int, Tensor] = {}  # what is one tensor stays one
    return {key: copies.setdefault(id(tensor), tensor.detach().clone()) for key, tensor in result.items()}


def save_size(
    source: Artifact | DecomposedNet,
    plan: RankPlan,
    path: str | os.PathLike[str],
    info: Mapping[str, Any] | None = None,
) -> None:
    """Write one size as a plain state dict: ``safetensors.torch.load_file`` reads it, and `load` makes the module.

    Tensors that layers share are written for each of them. `info` takes the place of the network's own.
    """
    artifact = source if isinstance(source, Artifact) else source.artifact()
    tensors = size_state_dict(artifact, plan)
    write_container(path, describe_size(artifact, plan, tensors, artifact.info if info is None else info), tensors)


@torch.no_grad()
def shrink(artifact: Artifact, plan: RankPlan) -> Artifact:
    """The network with this size as its largest: the bases that this size does not use are gone, smaller sizes stay.

    The weight of a layer that loses bases becomes W̃. Fractions of MACs and of parameters keep counting from the
    original network.
    """
    check_plan(artifact, plan)
    selector = artifact.selector
    ranks = np.array([plan.ranks[cost.name] for cost in selector.costs], dtype=np.int64)
    if plan.is_full:
        return replace(artifact, plan=plan)
    state, factors = {**artifact.state, **_statistics_at(artifact, plan)}, dict(artifact.factors)
    for layer, cost in zip(artifact.skeleton.layers, selector.costs, strict=True):
        rank, whole = plan.ranks[layer.name], artifact.factors[layer.name]
        if rank < len(whole.first):
            weight = truncated(artifact.state[layer.key], whole, layer.form, rank, cost.full_rank)
            state.update({join(path, "weight"): weight for path in layer.paths})
            part = sliced(whole, rank)
            factors[layer.name] = Factors(part.first.clone(), part.second.clone())  # lets go of the rest
    upper = np.where(ranks < selector.full_ranks, ranks, selector.upper)
    smaller = with_stored(replace(selector, lower=np.minimum(selector.lower, upper), upper=upper), ranks)
    statistics = artifact.statistics and _up_to(artifact.statistics, plan)
    return replace(artifact, state=state, factors=factors, selector=smaller, plan=plan, statistics=statistics)


def _up_to(statistics: Statistics, plan: RankPlan) -> Statistics:
    """The statistics of the sizes that are not larger than this one, and of the next, the end of interpolation."""
    next_larger = int(np.searchsorted(statistics.positions, position(plan), side="right"))
    kept = [
        i
        for i, calibrated in enumerate(statistics.plans)
        if i <= next_larger or all(rank <= plan.ranks[name] for name, rank in calibrated.ranks.items())
    ]
    return replace(
        statistics,
        positions=tuple(statistics.positions[i] for i in kept),
        plans=tuple(statistics.plans[i] for i in kept),
        mean_SC=statistics.mean_SC[kept],
        var_SC=statistics.var_SC[kept],
    )


def _statistics_at(artifact: Artifact, plan: RankPlan) -> dict[str, Tensor]:
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


def check_plan(artifact: Artifact, plan: RankPlan) -> None:
    """Refuse a plan of another network, or one that needs bases which are not there."""
    names = [layer.name for layer in artifact.skeleton.layers]
    if not isinstance(plan, RankPlan) or list(plan.ranks) != names:
        raise InvalidArgumentError("plan: it is not of this network; allowed: what its selector.choose() returns")
    for name, most in zip(names, stored_ranks(artifact.factors).tolist(), strict=True):
        if not 1 <= plan.ranks[name] <= most:
            raise InvalidArgumentError(f"plan: layer '{name}' has rank {plan.ranks[name]}; allowed: 1 to {most}")
