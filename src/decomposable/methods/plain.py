"""Normal learning: the loss of the full network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from decomposable.settings import Settings


class PlainMethod:
    """One pass, one gradient."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model = model

    def backward(self, closure: Callable[[nn.Module], Tensor]) -> dict[str, Tensor | float]:
        """Add the gradient of the loss."""
        loss = closure(self.model)
        loss.backward()
        return {"loss": loss.detach()}

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do."""
