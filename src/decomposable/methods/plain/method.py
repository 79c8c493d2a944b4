"""The model as it is, decomposed after training."""

from __future__ import annotations

from torch import Tensor, nn

from decomposable.methods.base import Material, Training
from decomposable.methods.decomposing import decomposed, each_form_and_criterion
from decomposable.methods.plain.step import PlainStep
from decomposable.methods.settings import Settings
from decomposable.network.decomposed import DecomposedNet


class Plain:
    """Normal learning."""

    name = "plain"
    summary = "normal learning, decomposed afterwards by both forms and every criterion"

    def check(self, settings: Settings, *, has_init: bool) -> None:
        """Nothing is refused."""

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> nn.Module:
        """The model itself."""
        return model

    def step(self, network: nn.Module, settings: Settings) -> PlainStep:
        """One pass, one gradient."""
        return PlainStep(network)

    def sized(self, network: nn.Module, material: Material, settings: Settings) -> DecomposedNet:
        """Decomposed by the form and the criterion of the settings."""
        return decomposed(network, material, settings)

    def trainings(self, settings: Settings) -> tuple[Training, ...]:
        """One, whose network is decomposed in every way."""
        return (Training(curve="base", variants=each_form_and_criterion("base")),)


METHOD = Plain()
