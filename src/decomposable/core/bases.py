"""The bases of a model's weights in training: when an SVD is due, and what stands in for it until then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from decomposable.core.forms.base import Decomposition
from decomposable.core.layers import Layer
from decomposable.core.processes import ALONE, Processes
from decomposable.core.sharing import shared
from decomposable.core.svd import check_finite, most_precise
from decomposable_edge.errors import InvalidArgumentError


class KeptBases:
    """The decompositions of a model's weights, computed when the weights have changed, or every `refresh` changes."""

    def __init__(self, layers: tuple[Layer, ...], refresh: int, processes: Processes = ALONE) -> None:
        self.layers, self.refresh, self._processes = layers, refresh, processes
        self._current: dict[str, Decomposition] = {}
        self._seen: dict[str, tuple[int | None, float]] = {}  # version counter and sum of the weight decomposed
        self._projected: set[str] = set()  # layers that have changed since their own last SVD
        self._age = 0  # changes of the weights since the last SVD

    @torch.no_grad()
    def of_current_weights(self) -> dict[str, Decomposition]:
        """What every layer's weight is decomposed into; between refreshes the weight along the bases kept."""
        marks = self._marks()
        is_new = self._processes.anywhere([not self._is_seen(layer, marks[layer.name]) for layer in self.layers])
        changed = [layer for layer, is_it in zip(self.layers, is_new, strict=True) if is_it]
        if changed:
            is_due = len(self._current) < len(self.layers) or self._age + 1 >= self.refresh
            names = {layer.name for layer in changed}
            with torch.autocast(self.layers[0].weight.device.type, enabled=False):
                if is_due:
                    late = [layer for layer in self.layers if layer.name in self._projected - names]
                    fresh = shared([*changed, *late], self._processes)
                    self._projected.clear()
                else:
                    for layer in changed:
                        check_finite(layer.name, layer.weight.detach())
                    self._projected |= names
                    fresh = {
                        layer.name: layer.numerics.project(layer.weight.detach(), self._current[layer.name])
                        for layer in changed
                    }
            self._age = 0 if is_due else self._age + 1
            self._current.update(fresh)
            self._seen.update({layer.name: marks[layer.name] for layer in changed})
        return dict(self._current)

    def _marks(self) -> dict[str, tuple[int | None, float]]:
        # The version counter misses what is written through .data, the sums an in-place change that undoes itself.
        weights = [layer.weight.detach() for layer in self.layers]
        sums = torch.stack([_fingerprint(w) for w in weights]).tolist() if weights else []
        return {layer.name: (layer.weight._version, total) for layer, total in zip(self.layers, sums, strict=True)}

    def _is_seen(self, layer: Layer, mark: tuple[int | None, float]) -> bool:
        version, total = self._seen.get(layer.name, (None, math.nan))
        is_same = total == mark[1] and (version is None or version == mark[0])
        return is_same and self._current[layer.name].spectra[0].device == layer.weight.device

    def state_dict(self) -> dict[str, Any]:
        """Empty where every change of the weights is followed by an SVD anyway."""
        if self.refresh == 1:
            return {}
        layers = {name: {**found._asdict(), "sum": self._seen[name][1]} for name, found in self._current.items()}
        return {"age": self._age, "layers": layers, "projected": sorted(self._projected)}

    def check(self, state: Any) -> None:
        """Refuse what is not a `state_dict` of bases of this model."""
        if not isinstance(state, Mapping):
            raise InvalidArgumentError(f"state: its bases are {state!r:.40}; allowed: what state_dict() returned")
        stored = state.get("layers", {})
        expected = {layer.name: layer for layer in self.layers}
        for name, entry in stored.items():
            if name not in expected or not isinstance(entry.get("sum"), float) or _bases(expected[name], entry) is None:
                raise InvalidArgumentError(
                    f"state: its layer '{name}' is not one of this model's; allowed: a state of this model"
                )
        age, projected = state.get("age", 0), state.get("projected", [])
        if type(age) is not int or not 0 <= age < self.refresh or not set(projected) <= expected.keys():
            raise InvalidArgumentError(f"state: it is of age {age!r:.40}; allowed: what state_dict() returned")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the bases of a `state_dict`."""
        self._age, self._projected = state.get("age", 0), set(state.get("projected", []))
        self._current = {}
        self._seen = {}
        layers = {layer.name: layer for layer in self.layers}
        for name, entry in state.get("layers", {}).items():
            device = layers[name].weight.device
            moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in entry.items()}
            found = _bases(layers[name], moved)
            assert found is not None
            self._current[name], self._seen[name] = found, (None, entry["sum"])


def _bases(layer: Layer, entry: Mapping[str, Any]) -> Decomposition | None:
    return layer.numerics.restored(layer.chain, entry)


def _fingerprint(weight: Tensor) -> Tensor:
    """A number that changes when entries do, or change places."""
    exact = most_precise(weight.device)
    rows, columns = (weight.flatten(1).sum(dim=d, dtype=exact) for d in (1, 0))
    by_row, by_column = (t @ torch.arange(1, len(t) + 1, dtype=t.dtype, device=t.device) for t in (rows, columns))
    return by_row + by_column
