"""What every method offers, so that one loop trains them all, and knowing one is knowing all.

Each is a module of the same shape or, where that is long, a package of such files:

    what it is and where it comes from
    settings    its `MethodSettings`, where it has settings of its own
    step        its `Step`, where one step of the training is more than one pass and one gradient
    method      the `Method`: the network that is trained, and that network's sizes afterwards; `METHOD`

From a recipe's model to a network at some sizes, the calls are

    network = method.network(model, example_input, settings, is_trained=...)
    step = method.step(network, settings)            step.backward(closure), again and again
    sized = method.sized(network, material, settings)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from decomposable.data.base import Batch
from decomposable.progress import Report, quiet
from decomposable.recipes.settings import Settings
from decomposable.recipes.values import MethodSettings

Closure = Callable[[nn.Module], Tensor]


class Step(Protocol):
    """What the training loop asks of a method."""

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the gradient of one batch to every parameter's `.grad`; what to log comes back, the losses first.

        `closure(net)` is the loss of the network it is given; every call's loss is an entry whose name starts with
        "loss", in the order of the calls.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return everything besides the network that the next step depends on; by default nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state."""
        return


@runtime_checkable
class Paced(Protocol):
    """A step that is another one early in a training than late: it is told before each."""

    def at(self, step: int, steps: int) -> None:
        """Say which step of how many is next, from 0."""


@runtime_checkable
class Steady(Protocol):
    """A step for which the learning rate falls late."""

    @property
    def steady(self) -> float:
        """Return the part of the training until which the rate stays highest; then its schedule begins."""


@runtime_checkable
class Averaging(Protocol):
    """A step that averages its gradients over the processes of a run itself, because it goes on with their mean.

    Of any other, the loop does it afterwards.
    """

    def has_samples(self, count: int) -> None:
        """Take in how many samples the next batch has on this process."""


@runtime_checkable
class Looking(Protocol):
    """A step that looks at more than its batches: before the first of them it is given what sizes are made with."""

    images: int  # how many of the training it is to see, in whole batches

    def look_at(self, material: CalibrationData) -> None:
        """These images are its `calibration`, which may be gone through at any time."""


class Sized(Protocol):
    """A trained network at its sizes: a `DecomposedNet`, or a network of a method that makes sizes in another way."""

    def save(self, path: Any, info: Mapping[str, Any] | None = None) -> object:
        """Write all sizes to one file."""


@runtime_checkable
class HasOwnSizes(Sized, Protocol):
    """A network with a list of sizes of its own, where a decomposed network takes any size."""

    def plan(self) -> Any:
        """Return the current size."""

    def offered(self) -> list[tuple[float, Any]]:
        """Return the sizes, each with its part of the MACs."""

    def resize_(self, plan: Any, /) -> Any:
        """Take one of them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network at the current size."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibrationData:
    """What the sizes of a trained network are made with: data of the training, and its loss."""

    example_input: Tensor
    calibration: Iterable[Batch] = field(repr=False)  # of training images, augmented; may be gone through again
    calibration_images: int = 0  # how many they are, where it is known
    loss: Callable[[nn.Module, Batch], Tensor]
    progress: Report = quiet


class PlainStep(Step):
    """One pass, one gradient: that of the loss."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the gradient of the loss."""
        loss = closure(self.network)
        loss.backward()
        return {"loss": loss.detach()}


class Method:
    """A way to train a network, and to have it at some sizes afterwards.

    What it says here is normal learning of the model as it is; a method replaces what it does otherwise, and has to
    say its sizes.

    Attributes:
        name: as it is typed.
        summary: one line about it.
        label: what a figure calls it; its name where it says nothing.
        settings: the class of the settings that it has of its own.
        decomposes: whether its `sized` gives a `DecomposedNet`, which can be calibrated again.
    """

    name: str
    summary: str
    label: str = ""
    settings: type[MethodSettings] | None = None
    decomposes: bool = True

    def check(self, settings: Settings, *, has_init: bool) -> None:
        """Refuse settings that it cannot work with, before anything is made."""

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> nn.Module:
        """Return what is trained, made from the recipe's model, whose weights are fresh or trained."""
        return model

    def step(self, network: nn.Module, settings: Settings) -> Step:
        """Return the training step around that network."""
        return PlainStep(network)

    def sized(self, network: nn.Module, material: CalibrationData, settings: Settings) -> Sized:
        """Return the trained network at its sizes."""
        raise NotImplementedError
