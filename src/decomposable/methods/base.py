"""What every method offers, so that one loop trains them all, one table compares them, and knowing one is knowing all.

Each is a package of the same shape:

    __init__.py    what it is and where it comes from; `METHOD`
    method.py      the `Method`: the network that is trained, and that network's sizes afterwards
    step.py        the `Step`: what happens in one step of the training

From a recipe's model to a network at some sizes, the calls are

    network = method.network(model, example_input, settings, is_trained=...)
    step = method.step(network, settings)            step.backward(closure), again and again
    sized = method.sized(network, material, settings)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from decomposable.data.base import Batch
from decomposable.methods.settings import Settings
from decomposable.progress import Report, quiet

Closure = Callable[[nn.Module], Tensor]
Overrides = Mapping[str, Any]


class Step(Protocol):
    """What the training loop asks of a method."""

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the gradient of one batch to every parameter's `.grad`; what to log comes back, the losses first.

        `closure(net)` is the loss of the network it is given; every call's loss is an entry whose name starts with
        "loss", in the order of the calls.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything besides the network that the next step depends on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class Plan(Protocol):
    """One size of a network: a `RankPlan`, or a `Size`."""

    @property
    def macs(self) -> int | None:
        """Multiply-accumulates for one sample."""

    @property
    def params(self) -> int:
        """Parameters of the network."""

    @property
    def macs_fraction(self) -> float | None:
        """MACs as a part of the original's."""

    @property
    def params_fraction(self) -> float:
        """Parameters as a part of the original's."""


class Sized(Protocol):
    """A trained network at several sizes: a `DecomposedNet`, or a `SizedNet`."""

    @property
    def plan(self) -> Any:
        """The size in force."""

    def resize_(self, *, macs: float | None = None, params: float | None = None) -> Any:
        """Take the largest size that fits, without retraining; its plan comes back."""

    def set_plan_(self, plan: Any) -> Any:
        """Take this size."""

    def extract(self) -> nn.Module:
        """The network at the size in force as a plain module of its own."""

    def save(self, path: str | os.PathLike[str], info: Mapping[str, Any] | None = None) -> None:
        """Write all sizes to one file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Material:
    """What the sizes of a trained network are made with: data of the training, and its loss."""

    example_input: Tensor
    calibration: Iterable[Batch] = field(repr=False)  # of training images, augmented; may be gone through again
    loss: Callable[[nn.Module, Batch], Tensor]
    progress: Report = quiet


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training that a method needs in a comparison.

    Attributes:
        curve: the name of what comes out, in the records and in the figure; several trainings may share one.
        folder: its own folder among those of the method and seed; empty where there is only one training.
        settings: to be replaced in those of the recipe.
        variants: instead of `curve`, the names of several ways to make sizes of the one trained network, each with the
            settings that it replaces.
        choice: tells apart trainings of one curve that are alternatives, of which the most accurate one counts.
        init: the method whose trained network, of the same seed, this one starts from.
        ranks: the part of the MACs at which Decomposable-Net, of the same seed, says the ranks of this one.
    """

    curve: str
    folder: str = ""
    settings: Overrides = field(default_factory=dict)
    variants: Mapping[str, Overrides] = field(default_factory=dict)
    choice: str = ""
    init: str | None = None
    ranks: float | None = None


class Method(Protocol):
    """A way to train a network, and to have it at some sizes afterwards."""

    @property
    def name(self) -> str:
        """As it is typed."""

    @property
    def summary(self) -> str:
        """One line about it."""

    def check(self, settings: Settings, *, has_init: bool) -> None:
        """Refuse settings that it cannot work with, before anything is made."""

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> nn.Module:
        """What is trained, made from the recipe's model, whose weights are fresh or were trained before."""

    def step(self, network: nn.Module, settings: Settings) -> Step:
        """The training step around that network."""

    def sized(self, network: nn.Module, material: Material, settings: Settings) -> Sized:
        """The trained network at its sizes."""

    def trainings(self, settings: Settings) -> tuple[Training, ...]:
        """What a comparison trains of this method."""


class Rebuilds(Protocol):
    """A method whose `sized` makes a `SizedNet`: it also makes the modules of a file again."""

    def rebuilt(
        self, model: nn.Module, example_input: Tensor, settings: Settings, structure: Mapping[str, Any]
    ) -> tuple[nn.Module, Callable[[Any], nn.Module]]:
        """The network whose state dict a file holds, and the function from a `Size` to its plain module."""

    def size_again(self, network: nn.Module, value: float, example_input: Tensor) -> Any:
        """What the `Size` of this value costs: a file is not believed."""
