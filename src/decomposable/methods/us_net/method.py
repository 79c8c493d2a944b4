"""The model, trained at all widths; its sizes are widths with statistics of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from decomposable.errors import InvalidArgumentError
from decomposable.methods.base import LineStyle, Material, Method
from decomposable.methods.settings import Settings
from decomposable.methods.us_net.settings import UniversalSettings
from decomposable.methods.us_net.step import SandwichStep
from decomposable.methods.width.network import WidthsNet
from decomposable.methods.widths import Widths
from decomposable.network.sized import Size, SizedNet, batch_statistics
from decomposable.progress import Tracker


class UniversallySlimmable(Method):
    """US-Nets."""

    name = "us-net"
    summary = "random widths together, distilled from the largest: universally slimmable networks"
    label = "US-Net"
    style = LineStyle(color="#D55E00", marker="s", linestyle="--", place=1)
    settings = UniversalSettings

    def check(self, settings: Settings, *, has_init: bool) -> None:
        """The model itself is the largest width."""
        low, high = settings.of(UniversalSettings).width_range
        if high != 1:
            raise InvalidArgumentError(
                f"width_range={low:g},{high:g}; allowed with method=us-net: a largest width of 1, as in {low:g},1"
            )

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> WidthsNet:
        """The model, and what it is at other widths."""
        own = settings.of(UniversalSettings)
        network = WidthsNet(model, example_input, multiple=own.width_multiple)
        for width in (0.75, own.width_range[0]):
            network.widths.cost(width)  # what cannot be so narrow is refused now, and not in the middle of a training
        return network

    def step(self, network: nn.Module, settings: Settings) -> SandwichStep:
        """The sandwich rule with in-place distillation."""
        assert isinstance(network, WidthsNet)
        return SandwichStep(network, settings)

    def sized(self, network: nn.Module, material: Material, settings: Settings) -> SizedNet:
        """For each of the settings' sizes the largest width within it; the statistics of each are calculated anew."""
        assert isinstance(network, WidthsNet)
        sizes = sizes_within(network.widths, settings)
        statistics = {}
        tracker = Tracker(material.progress, "calibrating", total=len(sizes), unit="sizes")
        for i, size in enumerate(sizes):
            tracker.update(i, size.name)
            if network.widths.norms:
                statistics[size.value] = batch_statistics(network.build(size), material.calibration)
        return SizedNet(
            method=self.name,
            network=network,
            sizes=sizes,
            build=network.build,
            statistics=statistics,
            structure={
                "multiple": network.widths.multiple,
                "input_shape": list(material.example_input.shape[1:]),
            },
        )

    def rebuilt(
        self, model: nn.Module, example_input: Tensor, settings: Settings, structure: Mapping[str, Any]
    ) -> tuple[nn.Module, Callable[[Any], nn.Module]]:
        """The network, for the weights of a file."""
        network = WidthsNet(model, example_input, multiple=structure["multiple"])
        return network, network.build

    def size_again(self, network: nn.Module, value: float, example_input: Tensor) -> Size:
        """Any width."""
        assert isinstance(network, WidthsNet)
        return network.widths.size(value)


def sizes_within(widths: Widths, settings: Settings) -> list[Size]:
    """The largest width within each of the settings' sizes that is not too small, and the two ends; each once."""
    low, high = settings.of(UniversalSettings).width_range
    full, least = widths.cost(1.0).macs, widths.cost(low).macs
    budgets = [part * full * (1 + 1e-12) for part in settings.sizes]  # rounding is no excess
    chosen = [widths.largest(macs=macs, smallest=low, largest=high) for macs in budgets if macs >= least]
    found: dict[tuple[int, int], Size] = {}
    for width in (high, low, *chosen):
        size = widths.size(width)
        found.setdefault((size.macs, size.params), size)  # widths that differ by less than a channel are the same
    return list(found.values())


METHOD = UniversallySlimmable()
