"""Universally slimmable networks (US-Nets): any width between the smallest and the largest one.

Yu, Huang: "Universally Slimmable Networks and Improved Training Techniques", ICCV 2019, arXiv:1903.05134. Every step
has the largest width, the smallest and a few random ones (the sandwich rule); the largest learns from the labels, all
others from what it says (in-place distillation). The widths share all weights, batch normalisation too; the statistics
of each width that is used afterwards are calculated after training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decomposable.data.base import generator_for
from decomposable.progress import Tracker
from decomposable.recipes.settings import Settings
from decomposable.recipes.values import Check
from decomposable.training.methods.base import CalibrationData, Closure
from decomposable.training.methods.outputs import loss_and_outputs
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.methods.base import LineStyle, Rival
from decomposable_lab.methods.sized import MethodSize, SizedNet, batch_statistics
from decomposable_lab.methods.width import WidthsSettings
from decomposable_lab.methods.widths import Widths, WidthsNet


@dataclass(frozen=True, kw_only=True)
class UniversalSettings(WidthsSettings):
    """Hold the widths of a step."""

    width_range: tuple[float, float] = (0.25, 1.0)  # the smallest and the largest width
    random_widths: int = 2  # in every step, besides these two

    checks: ClassVar[tuple[Check, ...]] = (
        *WidthsSettings.checks,
        (("width_range",), "two widths with 0 < low <= high <= 1, as in 0.25,1", lambda v: 0 < v[0] <= v[1] <= 1),
        (("random_widths",), "an int of at least 0", lambda v: v >= 0),
    )


class SandwichStep:
    """Train by the sandwich rule with in-place distillation.

                 ┌─ width 1 ───────────→ outputs ─→ loss of the labels ─────────────────────────┐
                 │                          │ softmax, detached                                │
    one batch ───┼─ smallest width ──→ outputs ─→ cross-entropy with it ────────────────────────┼─(+)─→ .grad
                 └─ random widths ───→ outputs ─→ cross-entropy with it ────────────────────────┘
    """

    def __init__(self, network: WidthsNet, settings: Settings) -> None:
        self.network = network
        own = settings.of(UniversalSettings)
        self.range, self.random_widths = own.width_range, own.random_widths
        self._generator = generator_for(settings.seed, "widths", 0)

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the gradient of all widths. The losses of the labels are logged for all, learned from at width 1 only."""
        loss, outputs = loss_and_outputs(closure, self.network.model, "us-net")
        loss.backward()
        target = outputs.detach().softmax(dim=1)
        losses: dict[str, Tensor | float] = {"loss": loss.detach()}
        distillations: dict[str, Tensor | float] = {}
        for name, width in self.draw().items():
            loss, outputs = loss_and_outputs(closure, self.network.widths.at(width), "us-net")
            distillation = F.cross_entropy(outputs, target)
            distillation.backward()
            losses[f"loss_{name}"] = loss.detach()
            distillations[f"distillation_{name}"] = distillation.detach()
        return {**losses, **distillations}

    def draw(self) -> dict[str, float]:
        """Return the widths of one step besides the largest, by the names under which they are logged."""
        low, high = self.range
        places = torch.rand(self.random_widths, dtype=torch.float64, generator=self._generator).tolist()
        drawn = {f"random{i}": low + (high - low) * place for i, place in enumerate(places, start=1)}
        return {f"{low:g}": low, **drawn}

    def state_dict(self) -> dict[str, Any]:
        """Return the generator of the widths."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state."""
        if "generator" not in state:
            raise InvalidArgumentError("state: it has no entry 'generator'; allowed: what state_dict() returned")
        self._generator.set_state(state["generator"].cpu())


class UniversallySlimmable(Rival):
    """Train the model at all widths; its sizes are widths with statistics of their own."""

    name = "us-net"
    summary = "random widths together, distilled from the largest: universally slimmable networks"
    label = "US-Net"
    style = LineStyle(color="#D55E00", marker="s", linestyle="--", place=1)
    settings = UniversalSettings
    decomposes = False

    def check(self, settings: Settings, *, has_init: bool) -> None:
        """Refuse a largest width other than 1: that is the model itself."""
        low, high = settings.of(UniversalSettings).width_range
        if high != 1:
            raise InvalidArgumentError(
                f"width_range={low:g},{high:g}; allowed with method=us-net: a largest width of 1, as in {low:g},1"
            )

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> WidthsNet:
        """Return the model, and what it is at other widths."""
        own = settings.of(UniversalSettings)
        network = WidthsNet(model, example_input, multiple=own.width_multiple)
        for width in (0.75, own.width_range[0]):
            network.widths.cost(width)  # what cannot be so narrow is refused now, and not in the middle of a training
        return network

    def step(self, network: nn.Module, settings: Settings) -> SandwichStep:
        """Return the sandwich rule with in-place distillation."""
        assert isinstance(network, WidthsNet)
        return SandwichStep(network, settings)

    def sized(self, network: nn.Module, material: CalibrationData, settings: Settings) -> SizedNet:
        """Return for each of the settings' sizes the largest width within it, with statistics of its own."""
        assert isinstance(network, WidthsNet)
        sizes = _sizes_within(network.widths, settings)
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
            structure=network.structure(material.example_input),
        )

    def rebuilt(
        self, model: nn.Module, example_input: Tensor, settings: Settings, structure: Mapping[str, Any]
    ) -> tuple[nn.Module, Callable[[MethodSize], nn.Module]]:
        """Return the network, for the weights of a file."""
        network = WidthsNet(model, example_input, multiple=structure["multiple"])
        return network, network.build

    def size_again(self, network: nn.Module, value: float, example_input: Tensor) -> MethodSize:
        """Return any width."""
        assert isinstance(network, WidthsNet)
        return network.widths.size(value)


def _sizes_within(widths: Widths, settings: Settings) -> list[MethodSize]:
    """The largest width within each of the settings' sizes that is not too small, and the two ends; each once."""
    low, high = settings.of(UniversalSettings).width_range
    full, least = widths.cost(1.0).macs, widths.cost(low).macs
    budgets = [part * full * (1 + 1e-12) for part in settings.sizes]  # rounding is no excess
    chosen = [widths.largest(macs=macs, smallest=low, largest=high) for macs in budgets if macs >= least]
    found: dict[tuple[int, int], MethodSize] = {}
    for width in (high, low, *chosen):
        size = widths.size(width)
        found.setdefault((size.macs, size.params), size)  # widths that differ by less than a channel are the same
    return list(found.values())


METHOD = UniversallySlimmable()
