"""The model as it is, with what it takes: budgets are parts of what a pass costs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class WithExample(nn.Module):
    """The recipe's model, and one input of it."""

    example_input: Tensor

    def __init__(self, model: nn.Module, example_input: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("example_input", example_input[:1].clone(), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model."""
        return self.model(*args, **kwargs)
