"""The bases of a model's weights in training: when an SVD is due, who makes it, and what stands in for it until then.

Several processes share out the decompositions, each by one of them. Shares are by cost, so that all are done together.

                 ┌─ process 0: SVDs of its share ─┐
    all weights ─┤                                ├─ factors exchanged ─▶ the bases of all weights, the same bits on all
                 └─ process 1: SVDs of its share ─┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from decomposable.core.forms import Decomposition
from decomposable.core.layers import Layer, decomposed
from decomposable.core.processes import ALONE, Processes
from decomposable.core.svd import check_finite, most_precise
from decomposable_edge.errors import InvalidArgumentError

_EIGEN = 12.0  # what an eigenproblem costs, by K³, against a product of matrices: measured on a CPU, 9 to 17

_Mark = tuple[int | None, float]  # a weight's version counter, None where it is of an earlier run, and its sum


class KeptBases:
    """Keep the decompositions of a model's weights, made anew when the weights changed, or every `refresh` changes."""

    def __init__(self, layers: tuple[Layer, ...], refresh: int, processes: Processes = ALONE) -> None:
        self.layers, self.refresh, self._processes = layers, refresh, processes
        self._current: dict[str, Decomposition] = {}
        self._seen: dict[str, _Mark] = {}  # of the weights decomposed
        self._projected: set[str] = set()  # layers that have changed since their own last SVD
        self._age = 0  # changes of the weights since the last SVD

    @torch.no_grad()
    def of_current_weights(self) -> dict[str, Decomposition]:
        """Return what every layer's weight is decomposed into; between refreshes the weight along the bases kept."""
        marks = self._marks()
        is_new = self._processes.anywhere([not self._is_seen(layer, marks[layer.name]) for layer in self.layers])
        changed = {layer.name: layer for layer, is_it in zip(self.layers, is_new, strict=True) if is_it}
        if changed:
            is_due = len(self._current) < len(self.layers) or self._age + 1 >= self.refresh
            with torch.autocast(self.layers[0].weight.device.type, enabled=False):
                if is_due:
                    late = [layer for layer in self.layers if layer.name in self._projected - changed.keys()]
                    self._current |= shared([*changed.values(), *late], self._processes)
                else:
                    self._current |= {name: self._along_kept(layer) for name, layer in changed.items()}
            self._projected = set() if is_due else self._projected | changed.keys()
            self._age = 0 if is_due else self._age + 1
            self._seen |= {name: marks[name] for name in changed}
        return dict(self._current)

    def _along_kept(self, layer: Layer) -> Decomposition:
        weight = layer.weight.detach()
        check_finite(layer.name, weight)
        return layer.numerics.project(weight, self._current[layer.name])

    def _marks(self) -> dict[str, _Mark]:
        # The version counter misses what is written through .data, the sums an in-place change that undoes itself.
        weights = [layer.weight.detach() for layer in self.layers]
        sums = torch.stack([_fingerprint(w) for w in weights]).tolist()
        return {layer.name: (layer.weight._version, total) for layer, total in zip(self.layers, sums, strict=True)}

    def _is_seen(self, layer: Layer, mark: _Mark) -> bool:
        seen = self._seen.get(layer.name)
        is_same = seen is not None and seen[1] == mark[1] and seen[0] in (None, mark[0])
        return is_same and self._current[layer.name].spectra[0].device == layer.weight.device

    def state_dict(self) -> dict[str, Any]:
        """Return the bases; nothing where every change of the weights is followed by an SVD anyway."""
        if self.refresh == 1:
            return {}
        layers = {name: {**found._asdict(), "sum": self._seen[name][1]} for name, found in self._current.items()}
        return {"age": self._age, "layers": layers, "projected": sorted(self._projected)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the bases of a `state_dict` of this model; refuse another."""
        layers = {layer.name: layer for layer in self.layers}
        age, projected = state.get("age", 0), set(state.get("projected", []))
        if type(age) is not int or not 0 <= age < self.refresh or not projected <= layers.keys():
            raise InvalidArgumentError.about("state", f"age {age!r:.40}", "what state_dict() returned")
        self._age, self._projected = age, projected
        for name, entry in state.get("layers", {}).items():
            layer = layers.get(name)
            if layer is None or not isinstance(entry.get("sum"), float) or not _is_of(layer, entry):
                raise InvalidArgumentError.about("state", f"layer '{name:.80}'", "a state of this model")
            moved = {key: value.to(layer.weight.device) for key, value in entry.items() if key != "sum"}
            self._current[name], self._seen[name] = layer.numerics.bases(**moved), (None, entry["sum"])


def _is_of(layer: Layer, tensors: Mapping[str, Any]) -> bool:
    """Return whether there are the tensors of a decomposition of the layer's weight."""
    shapes = layer.numerics.tensors(layer.chain)
    found = {key: value for key, value in tensors.items() if key in shapes and isinstance(value, Tensor)}
    return shapes == {key: tuple(each.shape) for key, each in found.items() if each.is_floating_point()}


def _fingerprint(weight: Tensor) -> Tensor:
    """Return a number that changes when entries do, or change places."""
    sums = [weight.flatten(1).sum(dim=axis, dtype=most_precise(weight.device)) for axis in (1, 0)]
    by_row, by_column = (t @ torch.arange(1, len(t) + 1, dtype=t.dtype, device=t.device) for t in sums)
    return by_row + by_column


def svd_cost(shape: Sequence[int]) -> float:
    """Return about what the SVD of an M × N matrix takes, up to a constant: two products L K², an eigenproblem K³."""
    full_rank, longer = min(shape), max(shape)
    return full_rank**2 * (2.0 * longer + _EIGEN * full_rank)


def costs_of(layers: Sequence[Layer]) -> dict[str, float]:
    """Return about what decomposing each of the layers takes, by name."""
    costs = {}
    for layer in layers:
        left_sides = [shape for name, shape in layer.numerics.tensors(layer.chain).items() if name.startswith("u")]
        costs[layer.name] = sum(svd_cost((rows, layer.chain.dense_size // rows)) for rows, _ in left_sides)
    return costs


def owners_of(costs: Mapping[str, float], count: int) -> dict[str, int]:
    """Return who decomposes what: the costliest first, each to the process that has the least to do so far.

    >>> owners_of({"a": 9.0, "b": 8.0, "c": 7.0, "d": 2.0}, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    loads, owners = [0.0] * count, {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return owners


def shared(layers: Sequence[Layer], processes: Processes) -> dict[str, Decomposition]:
    """Return the bases of weights that all processes have; what fails on one fails on all."""
    if processes.is_alone:
        return decomposed(layers)
    owners = owners_of(costs_of(layers), processes.count)
    found = processes.together(lambda: decomposed([x for x in layers if owners[x.name] == processes.index]))
    tensors: dict[str, dict[str, Tensor]] = {}
    for layer in layers:
        if layer.name in found:  # contiguous, as it arrives elsewhere: of another layout products may differ in bits
            tensors[layer.name] = {key: each.contiguous() for key, each in found[layer.name]._asdict().items()}
        else:
            dtype = torch.float64 if layer.weight.dtype == torch.float64 else torch.float32
            shapes = layer.numerics.tensors(layer.chain)
            tensors[layer.name] = {key: layer.weight.new_empty(each, dtype=dtype) for key, each in shapes.items()}
    for owner in range(processes.count):
        sent = [part for layer in layers if owners[layer.name] == owner for part in tensors[layer.name].values()]
        processes.send_(sent, owner)
    return {layer.name: layer.numerics.bases(**tensors[layer.name]) for layer in layers}
