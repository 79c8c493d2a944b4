"""One step of Trained Rank Pruning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.svd import SVD
from decomposable.errors import InvalidArgumentError
from decomposable.methods.base import Closure
from decomposable.methods.settings import Settings
from decomposable.methods.trp.settings import TRPSettings
from decomposable.methods.trp.truncation import add_subgradients_, ranks_of, selected_layers, truncate_


class TRPStep:
    """The gradient of the loss and, every T steps, that of the nuclear norm at weights that were truncated before.

    In steps 0, T, 2T, …

        before the pass:  W ← U_r S_r V_rᵀ, in place, with the smallest r that keeps the part e of the energy Σσ²
        after it:         ∂L/∂W ← ∂L/∂W + τ U_r V_rᵀ

    and in between it is a plain step.

    Attributes:
        ranks: of every layer that is truncated, by name, as the last truncation left it.
    """

    def __init__(self, network: nn.Module, settings: Settings) -> None:
        self.network = network
        own = settings.of(TRPSettings)
        self.energy, self.strength, self.interval = own.trp_energy, own.trp_strength, own.trp_interval
        self.layers = selected_layers(network, settings)
        self.ranks = {layer.name: layer.full_rank for layer in self.layers}
        self._full_ranks = sum(self.ranks.values())
        self._steps = 0

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Truncate where it is due, then add the gradient; "kept" is the part of all bases that is left."""
        bases = self._truncate() if self._steps % self.interval == 0 else None
        loss = closure(self.network)
        loss.backward()
        if bases is not None:
            add_subgradients_(self.layers, bases, self.strength)
        self._steps += 1
        return {"loss": loss.detach(), "kept": sum(self.ranks.values()) / self._full_ranks}

    def _truncate(self) -> dict[str, SVD] | None:
        """The bases that are left of every layer; None where there was no SVD."""
        try:
            bases = truncate_(self.layers, self.energy)
        except torch.linalg.LinAlgError as error:
            warnings.warn(f"the SVD failed, this step does not truncate: {error}", stacklevel=3)
            return None
        self.ranks = ranks_of(bases)
        return bases

    def state_dict(self) -> dict[str, Any]:
        """The steps made, which say when the next truncation is due, and the ranks, which are logged until then."""
        return {"steps": self._steps, "ranks": dict(self.ranks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        ranks = state.get("ranks")
        if "steps" not in state or not isinstance(ranks, Mapping) or list(ranks) != list(self.ranks):
            raise InvalidArgumentError("state: it is not of these layers; allowed: what state_dict() returned")
        self._steps = int(state["steps"])
        self.ranks = {name: int(rank) for name, rank in ranks.items()}
