"""Ways to train. Each is a module with a class of the shape of `Method`; the loop in `training.py` is one for all."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from decomposable.errors import InvalidArgumentError
from decomposable.methods.decomposable import DecomposableMethod
from decomposable.methods.plain import PlainMethod
from decomposable.settings import Settings

__all__ = ["METHODS", "DecomposableMethod", "Method", "PlainMethod", "build"]

Closure = Callable[[nn.Module], Tensor]


class Method(Protocol):
    """What the loop asks of a method."""

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the gradient of one batch to every parameter's `.grad`; what to log comes back, the losses first.

        `closure(net)` is the loss of the network it is given; every call's loss is an entry whose name starts with
        "loss", in the order of the calls.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything besides the model that the next step depends on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


METHODS: dict[str, Callable[[nn.Module, Settings], Method]] = {
    "decomposable": DecomposableMethod,
    "plain": PlainMethod,
}


def check(name: str) -> None:
    """Refuse an unknown method, with the nearest name."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidArgumentError(f"method={name}; {hint}allowed: {', '.join(sorted(METHODS))}")


def build(model: nn.Module, settings: Settings) -> Method:
    """The method that the settings name, around this model."""
    check(settings.method)
    return METHODS[settings.method](model, settings)
