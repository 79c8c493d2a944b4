"""One pass, one gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from decomposable.methods.base import Closure


class PlainStep:
    """The gradient of the loss."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the gradient of the loss."""
        loss = closure(self.network)
        loss.backward()
        return {"loss": loss.detach()}

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do."""
