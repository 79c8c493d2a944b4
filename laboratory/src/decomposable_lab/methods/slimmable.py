"""Slimmable networks: a few widths that share their weights and are trained together.

Yu, Yang, Xu, Yang, Huang: "Slimmable Neural Networks", ICLR 2019, arXiv:1812.08928. Every step has one pass for each
width, and the mean (or the sum) of all losses is what is learned. The widths differ too much in their activations to
share batch normalisation: each has γ, β and statistics of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from decomposable.recipes.settings import Settings
from decomposable.recipes.values import Check, is_one_of
from decomposable.training.methods.base import CalibrationData, Closure, PlainStep
from decomposable_edge.errors import ArtifactError, InvalidArgumentError
from decomposable_lab.methods.base import LineStyle, Rival
from decomposable_lab.methods.sized import MethodSize, SizedNet
from decomposable_lab.methods.width import WidthsSettings, are_widths
from decomposable_lab.methods.widths import WidthsNet


@dataclass(frozen=True, kw_only=True)
class SlimmableSettings(WidthsSettings):
    """Hold the widths, and how they are trained together."""

    widths: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    width_loss: str = "mean"  # or "sum" of the losses of all widths

    checks: ClassVar[tuple[Check, ...]] = (
        *WidthsSettings.checks,
        (("widths",), "parts of the channels, as in 0.5,1", are_widths),
        (("width_loss",), "mean, sum", is_one_of("mean", "sum")),
    )


class SlimmableNet(WidthsNet):
    """Hold the model, whose batch normalisation is that of width 1, and the normalisation layers of all other widths.

    Attributes:
        model: as it was given.
        norms: for each of the `narrow` widths, the layers that stand in for the model's.
        narrow: the widths below 1, the largest first.
    """

    def __init__(self, model: nn.Module, example_input: Tensor, widths: Iterable[float], *, multiple: int) -> None:
        super().__init__(model, example_input, multiple=multiple)
        self.narrow = tuple(sorted((width for width in widths if width < 1), reverse=True))
        self.norms = nn.ModuleList(self.widths.private_norms(width) for width in self.narrow)

    def at(self, width: float) -> nn.Module:
        """Return the network at one of its widths, for training: the model itself, or views of its weights."""
        return self.model if width == 1 else self.widths.at(width, self._norms_of(width))

    def build(self, size: MethodSize) -> nn.Module:
        """Return the plain module of a size."""
        return self.widths.extract(size.value, self._norms_of(size.value))

    def _norms_of(self, width: float) -> dict[nn.Module, nn.Module]:
        if width == 1:
            return {}
        private = self.norms[self.narrow.index(width)]
        assert isinstance(private, nn.ModuleList)
        return dict(zip(self.widths.norms, private, strict=True))


class SlimmableStep(PlainStep):
    """Run a pass for every width, the largest first; the gradient is that of the mean, or the sum, of their losses."""

    network: SlimmableNet

    def __init__(self, network: SlimmableNet, settings: Settings) -> None:
        super().__init__(network)
        self.widths = (1.0, *network.narrow)
        self.share = 1 / len(self.widths) if settings.of(SlimmableSettings).width_loss == "mean" else 1.0

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the gradient of all widths; one graph at a time is in memory."""
        losses: dict[str, Tensor | float] = {}
        for width in self.widths:
            loss = closure(self.network.at(width))
            (loss * self.share).backward()
            losses["loss" if width == 1 else f"loss_{width:g}"] = loss.detach()
        return losses


class Slimmable(Rival):
    """Train the model with private batch normalisation of every width; these are its sizes afterwards."""

    name = "slimmable"
    summary = "a few widths together, each with its own batch normalisation: slimmable networks"
    label = "slimmable network"
    style = LineStyle(color="#E69F00", marker="D", linestyle=":", place=2)
    settings = SlimmableSettings
    decomposes = False

    def check(self, settings: Settings, *, has_init: bool) -> None:
        """Refuse widths without 1: the model itself is trained at width 1 and has its batch normalisation."""
        widths = settings.of(SlimmableSettings).widths
        if 1 not in widths or len(set(widths)) < len(widths):
            came = ",".join(f"{width:g}" for width in widths)
            raise InvalidArgumentError(f"widths={came}; allowed: 1 and others below it, each once, as in 0.25,0.5,1")

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> SlimmableNet:
        """Return the model with normalisation layers for all widths."""
        own = settings.of(SlimmableSettings)
        return SlimmableNet(model, example_input, own.widths, multiple=own.width_multiple)

    def step(self, network: nn.Module, settings: Settings) -> SlimmableStep:
        """Return one pass for every width."""
        assert isinstance(network, SlimmableNet)
        return SlimmableStep(network, settings)

    def sized(self, network: nn.Module, material: CalibrationData, settings: Settings) -> SizedNet:
        """Return every width, with the statistics that it gathered in training."""
        assert isinstance(network, SlimmableNet)
        widths = [1.0, *network.narrow]
        sizes = [network.widths.size(width) for width in widths]
        structure = {"widths": widths, **network.structure(material.example_input)}
        return SizedNet(method=self.name, network=network, sizes=sizes, build=network.build, structure=structure)

    def rebuilt(
        self, model: nn.Module, example_input: Tensor, settings: Settings, structure: Mapping[str, Any]
    ) -> tuple[nn.Module, Callable[[MethodSize], nn.Module]]:
        """Return the network with all its normalisation layers, for the weights of a file."""
        network = SlimmableNet(model, example_input, structure["widths"], multiple=structure["multiple"])
        return network, network.build

    def size_again(self, network: nn.Module, value: float, example_input: Tensor) -> MethodSize:
        """Return one of the widths that it has normalisation layers for."""
        assert isinstance(network, SlimmableNet)
        if value not in (1.0, *network.narrow):
            raise ArtifactError(f"width {value:g}; allowed: 1 and {', '.join(map(str, network.narrow))}")
        return network.widths.size(value)


METHOD = Slimmable()
