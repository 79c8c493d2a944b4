"""Decomposable-Net: the full network and a low-rank network of random size together (`joint.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from torch import Tensor, nn

from decomposable.core.criteria import CRITERIA
from decomposable.core.joint import JointObjective
from decomposable.network.decomposed import DecomposedNet
from decomposable.recipes.settings import Settings
from decomposable.recipes.values import Check, MethodSettings
from decomposable.training.methods.base import CalibrationData, Closure, Method, Step
from decomposable.training.methods.decomposing import decomposed
from decomposable_edge.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class JointSettings(MethodSettings):
    """What the paper compares its clipping with."""

    added_gap: float = 0.0  # appendix A: added to σ_i² − σ_k² in the gradient, in place of clipping σ_k/σ_i

    checks: ClassVar[tuple[Check, ...]] = ((("added_gap",), "a number of at least 0", lambda v: 0 <= v < inf),)


class JointStep:
    """Algorithm 1, for the loop."""

    def __init__(self, joint: JointObjective) -> None:
        self.joint = joint
        self._samples: int | None = None  # as the network's input tells

    @property
    def refresh(self) -> int:
        """Return how many steps share the bases that the first of them computes."""
        return self.joint.refresh

    def has_samples(self, count: int) -> None:
        """Say how many the next batch has: the gradients are averaged by them before they are mixed."""
        self._samples = count

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the joint gradient."""
        seen = self.joint.backward(closure, samples=self._samples).seen()
        return {name: value for name, value in seen.items() if name in ("loss", "loss_low", "ratio")}

    def state_dict(self) -> dict[str, Any]:
        """Return the generator of sizes, and the bases where they are kept."""
        return self.joint.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state."""
        self.joint.load_state_dict(state)


class Decomposable(Method):
    """The model as it is, trained by the joint objective and decomposed after training."""

    name = "decomposable"
    summary = "the full network and a low-rank network of random size together: Decomposable-Net"
    label = "Decomposable-Net"
    settings: type[MethodSettings] | None = JointSettings

    def check(self, settings: Settings, *, has_init: bool) -> None:
        """Refuse the Taylor criterion: it takes a gradient of its own, which no step of the training has."""
        if settings.criterion == "taylor":
            raise InvalidArgumentError(
                f"criterion=taylor: it is for networks that are trained; allowed with method={self.name}: "
                f"{', '.join(CRITERIA)}"
            )

    def step(self, network: nn.Module, settings: Settings) -> Step:
        """Return Algorithm 1 with the settings of a training."""
        return JointStep(
            JointObjective(
                network,
                form=settings.form,
                ratio=settings.ratio,
                balance=settings.balance,
                criterion=settings.criterion,
                min_rank=settings.min_rank,
                refresh=settings.refresh,
                seed=settings.seed,
                added_gap=settings.of(JointSettings).added_gap,
            )
        )

    def sized(self, network: nn.Module, material: CalibrationData, settings: Settings) -> DecomposedNet:
        """Return the network by the form and the criterion that it was trained with."""
        return decomposed(network, material, settings)


METHOD = Decomposable()
