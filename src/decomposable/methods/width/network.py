"""A model that knows itself at any width."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from decomposable.methods.widths import Widths
from decomposable.network.sized import Size


class WidthsNet(nn.Module):
    """The model and its widths; as a module it is the model."""

    def __init__(self, model: nn.Module, example_input: Tensor, *, multiple: int) -> None:
        super().__init__()
        self.model = model
        self.widths = Widths(model, example_input, multiple=multiple)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network at width 1."""
        return self.model(*args, **kwargs)

    def build(self, size: Size) -> nn.Module:
        """The plain module of a size, with the model's batch normalisation statistics, which are not its own."""
        return self.widths.extract(size.value)
