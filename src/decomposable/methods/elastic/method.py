"""The model as it is, trained at random budgets and decomposed after training."""

from __future__ import annotations

from torch import Tensor, nn

from decomposable.methods.base import LineStyle, Material
from decomposable.methods.decomposable.method import Decomposable
from decomposable.methods.elastic.network import WithExample
from decomposable.methods.elastic.settings import ElasticSettings
from decomposable.methods.elastic.step import ElasticStep
from decomposable.methods.settings import Settings
from decomposable.network.decomposed import DecomposedNet


class Elastic(Decomposable):
    """Decomposable-Net, drawn and taught otherwise."""

    name = "elastic"
    summary = "Decomposable-Net at random budgets, taught by the full network, in turns: better, for half the passes"
    label = "Elastic"
    style = LineStyle(color="#CC79A7", marker="*", linewidth=2.8, markersize=11, zorder=7, place=-1)
    settings = ElasticSettings

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> WithExample:
        """The model, with the input that its costs are told by."""
        return WithExample(model, example_input)

    def step(self, network: nn.Module, settings: Settings) -> ElasticStep:  # type: ignore[override]
        """One of the two networks in each step."""
        assert isinstance(network, WithExample)
        return ElasticStep(network, settings)

    def sized(self, network: nn.Module, material: Material, settings: Settings) -> DecomposedNet:
        """Decomposed by the form and the criterion that it was trained with."""
        assert isinstance(network, WithExample)
        return super().sized(network.model, material, settings)


METHOD = Elastic()
