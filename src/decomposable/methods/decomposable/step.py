"""Algorithm 1 with the settings of a training: `joint.py` does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from decomposable.core.joint import JointObjective
from decomposable.methods.base import Closure
from decomposable.methods.settings import Settings


class JointStep:
    """The joint objective with the settings of a training."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.joint = JointObjective(
            model,
            form=settings.form,
            ratio=settings.ratio,
            balance=settings.balance,
            criterion=settings.criterion,
            min_rank=settings.min_rank,
            refresh=settings.refresh,
            seed=settings.seed,
        )

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the joint gradient."""
        losses = self.joint.backward(closure)
        if self.joint.balance == 0:  # there was no low-rank pass
            return {"loss": losses.full}
        return {"loss": losses.full, "loss_low": losses.low, "ratio": losses.ratio}

    def state_dict(self) -> dict[str, Any]:
        """The generator of Z, and the bases where they are kept."""
        return self.joint.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.joint.load_state_dict(state)
