"""What a method says for a comparison, besides how it trains: which trainings it needs, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from decomposable.recipes.settings import Settings
from decomposable.training.methods import Method
from decomposable_lab.methods.sized import MethodSize

Overrides = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Describe one training that a method needs in a comparison.

    Attributes:
        curve: the name of what comes out, in the records and in the figure; several trainings may share one.
        folder: its own folder among those of the method and seed; empty where there is only one training.
        settings: to be replaced in those of the recipe.
        variants: instead of `curve`, the names of several ways to make sizes of the one trained network, each with the
            settings that it replaces.
        choice: tells apart trainings of one curve that are alternatives, of which the most accurate one counts.
        init: the method whose trained network, of the same seed, this one starts from.
        ranks: the part of the MACs at which Decomposable-Net, of the same seed, says the ranks of this one.
        pace: tells apart trainings of a method whose steps take differently long for the same form.
    """

    curve: str
    folder: str = ""
    settings: Overrides = field(default_factory=dict)
    variants: Mapping[str, Overrides] = field(default_factory=dict)
    choice: str = ""
    init: str | None = None
    ranks: float | None = None
    pace: str = ""


@dataclass(frozen=True, kw_only=True)
class LineStyle:
    """Say how a method is drawn in a figure, in the words of matplotlib."""

    color: str
    marker: str
    linestyle: str = "-"  # "none" where a method's sizes are trainings of their own: points without a line
    linewidth: float = 2.0
    markersize: float = 7.5
    zorder: float = 4  # what is higher is drawn above
    place: int = 100  # in the legend, from above


class Rival(Method):
    """Describe a method to compare with: it trains as every `Method` does, and says here what a comparison asks of it.

    Attributes:
        style: its line in a figure; one that no other has where it says nothing.
    """

    style: LineStyle | None = None

    def trainings(self, settings: Settings) -> tuple[Training, ...]:
        """Return what a comparison trains of this method."""
        return (Training(curve=self.name),)


@runtime_checkable
class Rebuilding(Protocol):
    """Make the modules of a file again, for a method whose `sized` makes a `SizedNet`."""

    def rebuilt(
        self, model: nn.Module, example_input: Tensor, settings: Settings, structure: Mapping[str, Any]
    ) -> tuple[nn.Module, Callable[[MethodSize], nn.Module]]:
        """Return the network whose state dict a file holds, and the function from a `MethodSize` to its module."""

    def size_again(self, network: nn.Module, value: float, example_input: Tensor) -> MethodSize:
        """Return what the `MethodSize` of this value costs: no file is believed."""
