"""One pass for every width; the gradient is that of the mean, or of the sum, of their losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from decomposable.methods.base import Closure
from decomposable.methods.settings import Settings
from decomposable.methods.slimmable.network import SlimmableNet
from decomposable.methods.slimmable.settings import SlimmableSettings


class SlimmableStep:
    """All widths in turn, the largest first."""

    def __init__(self, network: SlimmableNet, settings: Settings) -> None:
        self.network = network
        self.widths = (1.0, *network.narrow)
        self.share = 1 / len(self.widths) if settings.of(SlimmableSettings).width_loss == "mean" else 1.0

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the gradient of all widths; one graph at a time is in memory."""
        losses: dict[str, Tensor | float] = {}
        for width in self.widths:
            loss = closure(self.network.at(width))
            (loss * self.share).backward()
            losses["loss" if width == 1 else f"loss_{width:g}"] = loss.detach()
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do."""
