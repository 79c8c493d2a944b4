"""The decompositions of a model's weights, shared out among the processes that train it: each is made by one of them.

                 ┌─ process 0: SVDs of its share ─┐
    all weights ─┤                                ├─ factors exchanged ─▶ the bases of all weights, the same bits on all
                 └─ process 1: SVDs of its share ─┘

Shares are by what the decompositions cost, so that all processes are done at about the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decomposable.core.forms.base import Decomposition
from decomposable.core.layers import Layer, decomposed
from decomposable.core.processes import Processes

_EIGEN = 12.0  # what an eigenproblem costs, by K³, against a product of matrices: measured on a CPU, 9 to 17


def svd_cost(shape: Sequence[int]) -> float:
    """About what the SVD of an M × N matrix takes, up to a constant: two products L K² and an eigenproblem of K³."""
    full_rank, longer = min(shape), max(shape)
    return full_rank**2 * (2.0 * longer + _EIGEN * full_rank)


def costs_of(layers: Sequence[Layer]) -> dict[str, float]:
    """About what decomposing each of the layers takes, by name."""
    return {layer.name: sum(map(svd_cost, layer.numerics.matrices(layer.chain))) for layer in layers}


def owners_of(costs: Mapping[str, float], count: int) -> dict[str, int]:
    """Who decomposes what: the costliest first, each to the process that has the least to do so far.

    >>> owners_of({"a": 9.0, "b": 8.0, "c": 7.0, "d": 2.0}, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    loads = [0.0] * count
    owners = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return {name: owners[name] for name in costs}


def shared(layers: Sequence[Layer], processes: Processes) -> dict[str, Decomposition]:
    """The bases of weights that all processes have; what fails on one fails on all."""
    if processes.is_alone:
        return decomposed(layers)
    owners = owners_of(costs_of(layers), processes.count)
    found = processes.together(lambda: decomposed([x for x in layers if owners[x.name] == processes.index]))
    tensors = {layer.name: _laid_out(found[layer.name]) if layer.name in found else _room(layer) for layer in layers}
    for owner in range(processes.count):
        sent = [part for layer in layers if owners[layer.name] == owner for part in tensors[layer.name].values()]
        processes.send_(sent, owner)
    result = {}
    for layer in layers:
        whole = layer.numerics.restored(layer.chain, tensors[layer.name])
        assert whole is not None, layer.name
        result[layer.name] = whole
    return result


def _laid_out(found: Decomposition) -> dict[str, Tensor]:
    """As they arrive elsewhere: products of another layout may differ in their last bits."""
    return {name: part.contiguous() for name, part in found._asdict().items()}


def _room(layer: Layer) -> dict[str, Tensor]:
    """Room for what another process finds, of the type that a decomposition gives."""
    dtype = torch.float64 if layer.weight.dtype == torch.float64 else torch.float32
    shapes = layer.numerics.tensors(layer.chain)
    return {name: layer.weight.new_empty(shape, dtype=dtype) for name, shape in shapes.items()}
