"""The sandwich rule with in-place distillation.

             ┌─ width 1 ───────────→ outputs ─→ loss of the labels ─────────────────────────┐
             │                          │ softmax, detached                                │
one batch ───┼─ smallest width ──→ outputs ─→ cross-entropy with it ────────────────────────┼─(+)─→ .grad
             └─ random widths ───→ outputs ─→ cross-entropy with it ────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decomposable.data.base import generator_for
from decomposable.errors import InvalidArgumentError
from decomposable.methods.base import Closure
from decomposable.methods.outputs import loss_and_outputs
from decomposable.methods.settings import Settings
from decomposable.methods.us_net.settings import UniversalSettings
from decomposable.methods.width.network import WidthsNet


class SandwichStep:
    """The largest width, the smallest, and some in between."""

    def __init__(self, network: WidthsNet, settings: Settings) -> None:
        self.network = network
        own = settings.of(UniversalSettings)
        self.range, self.random_widths = own.width_range, own.random_widths
        self._generator = generator_for(settings.seed, "widths", 0)

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the gradient of all widths. The losses of the labels are logged for all, learned from at width 1 only."""
        loss, outputs = loss_and_outputs(closure, self.network.model, "us-net")
        loss.backward()
        target = outputs.detach().softmax(dim=1)
        losses: dict[str, Tensor | float] = {"loss": loss.detach()}
        distillations: dict[str, Tensor | float] = {}
        for name, width in self.draw().items():
            loss, outputs = loss_and_outputs(closure, self.network.widths.at(width), "us-net")
            distillation = F.cross_entropy(outputs, target)
            distillation.backward()
            losses[f"loss_{name}"] = loss.detach()
            distillations[f"distillation_{name}"] = distillation.detach()
        return {**losses, **distillations}

    def draw(self) -> dict[str, float]:
        """The widths of one step besides the largest, by the names under which they are logged."""
        low, high = self.range
        places = torch.rand(self.random_widths, dtype=torch.float64, generator=self._generator).tolist()
        drawn = {f"random{i}": low + (high - low) * place for i, place in enumerate(places, start=1)}
        return {f"{low:g}": low, **drawn}

    def state_dict(self) -> dict[str, Any]:
        """The generator of the widths."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if "generator" not in state:
            raise InvalidArgumentError("state: it has no entry 'generator'; allowed: what state_dict() returned")
        self._generator.set_state(state["generator"].cpu())
