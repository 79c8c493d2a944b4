"""The model and the private batch normalisation of every width, which are its sizes afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from decomposable.errors import ArtifactError, InvalidArgumentError
from decomposable.methods.base import LineStyle, Material, Method
from decomposable.methods.settings import Settings
from decomposable.methods.slimmable.network import SlimmableNet
from decomposable.methods.slimmable.settings import SlimmableSettings
from decomposable.methods.slimmable.step import SlimmableStep
from decomposable.network.sized import Size, SizedNet


class Slimmable(Method):
    """Slimmable networks."""

    name = "slimmable"
    summary = "a few widths together, each with its own batch normalisation: slimmable networks"
    label = "slimmable network"
    style = LineStyle(color="#E69F00", marker="D", linestyle=":", place=2)
    settings = SlimmableSettings

    def check(self, settings: Settings, *, has_init: bool) -> None:
        """The model itself is trained at width 1, and its batch normalisation is that of this width."""
        widths = settings.of(SlimmableSettings).widths
        if 1 not in widths or len(set(widths)) < len(widths):
            came = ",".join(f"{width:g}" for width in widths)
            raise InvalidArgumentError(f"widths={came}; allowed: 1 and others below it, each once, as in 0.25,0.5,1")

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> SlimmableNet:
        """The model with normalisation layers for all widths."""
        own = settings.of(SlimmableSettings)
        return SlimmableNet(model, example_input, own.widths, multiple=own.width_multiple)

    def step(self, network: nn.Module, settings: Settings) -> SlimmableStep:
        """One pass for every width."""
        assert isinstance(network, SlimmableNet)
        return SlimmableStep(network, settings)

    def sized(self, network: nn.Module, material: Material, settings: Settings) -> SizedNet:
        """Every width, with the statistics that it gathered in training."""
        assert isinstance(network, SlimmableNet)
        widths = (1.0, *network.narrow)
        return SizedNet(
            method=self.name,
            network=network,
            sizes=[network.widths.size(width) for width in widths],
            build=network.build,
            structure={
                "widths": list(widths),
                "multiple": network.widths.multiple,
                "input_shape": list(material.example_input.shape[1:]),
            },
        )

    def rebuilt(
        self, model: nn.Module, example_input: Tensor, settings: Settings, structure: Mapping[str, Any]
    ) -> tuple[nn.Module, Callable[[Any], nn.Module]]:
        """The network with all its normalisation layers, for the weights of a file."""
        network = SlimmableNet(model, example_input, structure["widths"], multiple=structure["multiple"])
        return network, network.build

    def size_again(self, network: nn.Module, value: float, example_input: Tensor) -> Size:
        """One of the widths that it has normalisation layers for."""
        assert isinstance(network, SlimmableNet)
        if value not in (1.0, *network.narrow):
            raise ArtifactError(f"width {value:g}; allowed: 1 and {', '.join(map(str, network.narrow))}")
        return network.widths.size(value)


METHOD = Slimmable()
