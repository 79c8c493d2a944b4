"""The decompositions of a model's weights, shared out among the processes that train it: each is made by one of them.

┌─ process 0: SVDs of its share ─┐
all weights ─┤                                ├─ factors exchanged ─▶ U, S, V of all weights, the same bits on all
└─ process 1: SVDs of its share ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from decomposable.core.processes import Processes
from decomposable.core.svd import SVD

Decompose = Callable[[Mapping[str, Tensor]], dict[str, SVD]]

_EIGEN = 12.0  # what an eigenproblem costs, by K³, against a product of matrices: measured on a CPU, 9 to 17


def svd_cost(shape: Sequence[int]) -> float:
    """About what the SVD of an M × N matrix takes, up to a constant: two products L K² and an eigenproblem of K³."""
    full_rank, longer = min(shape), max(shape)
    return full_rank**2 * (2.0 * longer + _EIGEN * full_rank)


def owners_of(shapes: Mapping[str, Sequence[int]], count: int) -> dict[str, int]:
    """Who decomposes what: the costliest first, each to the process that has the least to do so far.

    >>> owners_of({"a": (9, 9), "b": (8, 8), "c": (7, 7), "d": (30, 2)}, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    loads = [0.0] * count
    owners = {}
    for name in sorted(shapes, key=lambda name: (-svd_cost(shapes[name]), name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += svd_cost(shapes[name])
    return {name: owners[name] for name in shapes}


def shared(svd: Decompose, matrices: Mapping[str, Tensor], processes: Processes) -> dict[str, SVD]:
    """The `svd` of matrices that all processes have; what fails on one fails on all."""
    if processes.is_alone:
        return svd(matrices)
    owners = owners_of({name: matrix.shape for name, matrix in matrices.items()}, processes.count)
    own = {name: matrix for name, matrix in matrices.items() if owners[name] == processes.index}
    found = processes.together(lambda: svd(own))
    result = {name: _laid_out(found[name]) if name in found else _empty(matrix) for name, matrix in matrices.items()}
    for owner in range(processes.count):
        sent = [part for name in matrices if owners[name] == owner for part in result[name]]
        processes.send_(sent, owner)
    return result


def _laid_out(factors: SVD) -> SVD:
    """As they arrive elsewhere: products of another layout may differ in their last bits."""
    return SVD(*(part.contiguous() for part in factors))


def _empty(matrix: Tensor) -> SVD:
    """Room for the factors that another process finds, of the type that `svd` gives."""
    rows, columns = matrix.shape
    rank = min(rows, columns)
    dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    u, s, v = (matrix.new_empty(shape, dtype=dtype) for shape in ((rows, rank), (rank,), (columns, rank)))
    return SVD(u, s, v)
