"""The model as it is, trained by the joint objective and decomposed after training."""

from __future__ import annotations

from torch import nn

from decomposable.core.criteria import CRITERIA
from decomposable.errors import InvalidArgumentError
from decomposable.methods.base import LineStyle, Material, Method
from decomposable.methods.decomposable.step import JointStep
from decomposable.methods.decomposing import decomposed
from decomposable.methods.settings import Settings
from decomposable.network.decomposed import DecomposedNet


class Decomposable(Method):
    """The paper's method."""

    name = "decomposable"
    summary = "the full network and a low-rank network of random size together: Decomposable-Net"
    label = "Decomposable-Net"
    style = LineStyle(color="#0072B2", marker="o", linewidth=2.8, zorder=6, place=0)

    def check(self, settings: Settings, *, has_init: bool) -> None:
        """The Taylor criterion takes a gradient of its own, which no step of the training has."""
        if settings.criterion == "taylor":
            raise InvalidArgumentError(
                "criterion=taylor: it is for networks that are trained; allowed with method=decomposable: "
                f"{', '.join(CRITERIA)}"
            )

    def step(self, network: nn.Module, settings: Settings) -> JointStep:
        """Algorithm 1."""
        return JointStep(network, settings)

    def sized(self, network: nn.Module, material: Material, settings: Settings) -> DecomposedNet:
        """Decomposed by the form and the criterion that it was trained with."""
        return decomposed(network, material, settings)


METHOD = Decomposable()
