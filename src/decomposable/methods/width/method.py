"""The model at one width, which is the only size that comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from decomposable.core.tree import deep_copy
from decomposable.methods.base import LineStyle, Material, Method, Training
from decomposable.methods.settings import Settings, with_overrides
from decomposable.methods.width.settings import WidthSettings
from decomposable.methods.widths import Widths
from decomposable.network.sized import Size, SizedNet

_SIZE = "size_among_widths"  # an attribute of the narrow network: nothing in it tells what the full one would cost


class Width(Method):
    """A network with fewer channels."""

    name = "width"
    summary = "the network with a part of its channels, trained normally"
    label = "fewer channels, trained alone"
    style = LineStyle(color="#000000", marker="*", linestyle="none", markersize=13, zorder=7, place=6)
    settings = WidthSettings

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> nn.Module:
        """A plain module of its own. Weights that were trained are cut; fresh ones fit the narrower layers."""
        own = settings.of(WidthSettings)
        widths = Widths(model, example_input, multiple=own.width_multiple)
        network = widths.extract(own.width, is_fresh=not is_trained)
        vars(network)[_SIZE] = widths.size(own.width)
        return network

    def sized(self, network: nn.Module, material: Material, settings: Settings) -> SizedNet:
        """The network as it is, at its one size."""
        size: Size = vars(network)[_SIZE]
        return SizedNet(
            method=self.name,
            network=network,
            sizes=[size],
            build=_Copies(network),
            structure={
                "width": size.value,
                "multiple": settings.of(WidthSettings).width_multiple,
                "input_shape": list(material.example_input.shape[1:]),
            },
        )

    def rebuilt(
        self, model: nn.Module, example_input: Tensor, settings: Settings, structure: Mapping[str, Any]
    ) -> tuple[nn.Module, Callable[[Any], nn.Module]]:
        """The narrow network, for the weights of a file."""
        stored = {"width": structure["width"], "width_multiple": structure["multiple"]}
        network = self.network(model, example_input, with_overrides(settings, stored), is_trained=True)
        return network, _Copies(network)

    def size_again(self, network: nn.Module, value: float, example_input: Tensor) -> Size:
        """There is only one."""
        size: Size = vars(network)[_SIZE]
        return size

    def trainings(self, settings: Settings) -> tuple[Training, ...]:
        """One for every width."""
        return tuple(
            Training(curve="width", folder=f"{width:g}", settings={"width": width}, pace=f"{width:g}")
            for width in settings.of(WidthSettings).compare_widths
        )


@dataclass(frozen=True, eq=False)
class _Copies:
    """Copies of a network, whatever size is asked for."""

    network: nn.Module

    def __call__(self, size: Size) -> nn.Module:
        copy = deep_copy(self.network)
        vars(copy).pop(_SIZE, None)
        return copy


METHOD = Width()
