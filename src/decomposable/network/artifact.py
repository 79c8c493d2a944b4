"""The one file that holds a decomposed network at every size, and what can be done with it without its model.

    net ── save ──▶ file ─┬─ load ──▶ net
                          └─ read ──▶ Artifact ─┬─ size_state_dict, save_size ──▶ one size, plain
                                                └─ shrink ──▶ Artifact, smaller ── save ──▶ file

Both `load` and `read` take a size: then they read that part of the file alone, and give what `shrink` gives.
`docs/artifact.md` describes the format; `contents.py` writes it, `parsing.py` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decomposable.core.factors import Factors
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.file.container import Container, FilePath, open_container, write_container
from decomposable.network.file.contents import Artifact, describe_size
from decomposable.network.file.parsing import kind_of, naming, network_from
from decomposable.network.file.shrinking import bases_of, read_network, shrink, tuned_at, under_all_names
from decomposable.network.file.skeleton import chain_around, join
from decomposable_edge.errors import ArtifactError
from decomposable_edge.realising import realised
from decomposable_edge.sizing.plans import RankPlan, SizeKeywords, SizeRequest

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
        raise ArtifactError(
            f"{path}: holds one size only: decomposable.load(path, model=...) takes it in Python; here it takes "
            "the network file that it was made from"
        )


@torch.no_grad()
def size_state_dict(artifact: Artifact, plan: RankPlan) -> dict[str, Tensor]:
    """Return what ``extract().state_dict()`` of the network at this size is: the same keys and values, in the same order.

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
