"""The same network with fewer channels, trained normally: the simplest way to a smaller network.

One training gives one size, so that every size of a comparison is trained on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from decomposable.core.tree import deep_copy
from decomposable.recipes.settings import Settings
from decomposable.recipes.values import Check, MethodSettings
from decomposable.training.methods.base import CalibrationData
from decomposable.training.methods.flat import with_overrides
from decomposable_lab.methods.base import LineStyle, Rival, Training
from decomposable_lab.methods.sized import MethodSize, SizedNet
from decomposable_lab.methods.widths import Widths

_SIZE = "size_among_widths"  # an attribute of the narrow network: nothing in it tells what the full one would cost


def are_widths(value: Any) -> bool:
    """Return whether these are parts of the channels, at least one."""
    return bool(value) and all(0 < width <= 1 for width in value)


@dataclass(frozen=True, kw_only=True)
class WidthsSettings(MethodSettings):
    """Hold what all methods with widths share."""

    width_multiple: int = 1  # channels are rounded down to multiples of this

    checks: ClassVar[tuple[Check, ...]] = ((("width_multiple",), "an int of at least 1", lambda v: v >= 1),)


@dataclass(frozen=True, kw_only=True)
class WidthSettings(WidthsSettings):
    """Hold the one width that is trained."""

    width: float = 1.0  # the part of the channels

    compare_widths: tuple[float, ...] = (0.75, 0.5)

    swept: ClassVar[Mapping[str, str]] = {"width": "compare_widths"}
    checks: ClassVar[tuple[Check, ...]] = (
        *WidthsSettings.checks,
        (("width",), "a part of the channels in (0, 1]", lambda v: 0 < v <= 1),
        (("compare_widths",), "parts of the channels, as in 0.5,1", are_widths),
    )


class Width(Rival):
    """Train a network with fewer channels."""

    name = "width"
    summary = "the network with a part of its channels, trained normally"
    label = "fewer channels, trained alone"
    style = LineStyle(color="#000000", marker="*", linestyle="none", markersize=13, zorder=7, place=6)
    settings = WidthSettings
    decomposes = False

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> nn.Module:
        """Return a plain module of its own. Weights that were trained are cut; fresh ones fit the narrower layers."""
        own = settings.of(WidthSettings)
        widths = Widths(model, example_input, multiple=own.width_multiple)
        network = widths.extract(own.width, is_fresh=not is_trained)
        vars(network)[_SIZE] = widths.size(own.width)
        return network

    def sized(self, network: nn.Module, material: CalibrationData, settings: Settings) -> SizedNet:
        """Return the network as it is, at its one size."""
        size: MethodSize = vars(network)[_SIZE]
        structure = {
            "width": size.value,
            "multiple": settings.of(WidthSettings).width_multiple,
            "input_shape": list(material.example_input.shape[1:]),
        }
        build = partial(_build, network)
        return SizedNet(method=self.name, network=network, sizes=[size], build=build, structure=structure)

    def rebuilt(
        self, model: nn.Module, example_input: Tensor, settings: Settings, structure: Mapping[str, Any]
    ) -> tuple[nn.Module, Callable[[MethodSize], nn.Module]]:
        """Return the narrow network, for the weights of a file."""
        stored = {"width": structure["width"], "width_multiple": structure["multiple"]}
        network = self.network(model, example_input, with_overrides(settings, stored), is_trained=True)
        return network, partial(_build, network)

    def size_again(self, network: nn.Module, value: float, example_input: Tensor) -> MethodSize:
        """Return the only size."""
        return cast(MethodSize, vars(network)[_SIZE])

    def trainings(self, settings: Settings) -> tuple[Training, ...]:
        """Return one for every width."""
        return tuple(
            Training(curve="width", folder=f"{width:g}", settings={"width": width}, pace=f"{width:g}")
            for width in settings.of(WidthSettings).compare_widths
        )


def _build(network: nn.Module, size: MethodSize) -> nn.Module:
    copy = deep_copy(network)
    vars(copy).pop(_SIZE, None)
    return copy


METHOD = Width()
