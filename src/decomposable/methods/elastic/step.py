"""The joint objective with budgets, distillation and turns: `joint.py` does it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from decomposable.core.joint import JointObjective
from decomposable.errors import BudgetError
from decomposable.methods.base import Closure
from decomposable.methods.elastic.network import WithExample
from decomposable.methods.elastic.settings import ElasticSettings
from decomposable.methods.outputs import loss_and_outputs
from decomposable.methods.settings import Settings


class ElasticStep:
    """A full-rank step or a low-rank one, in turn."""

    def __init__(self, network: WithExample, settings: Settings) -> None:
        low, high = settings.of(ElasticSettings).elastic_macs
        try:
            self.joint = _objective(network, settings, (low, high))
        except BudgetError as error:
            if error.smallest is None:
                raise
            # A network that cannot be so small is trained for the smallest size that it can have.
            self.joint = _objective(network, settings, (error.smallest, max(high, error.smallest)))

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the gradient of the network whose turn it is, or of both; a loss that was not computed is not logged."""
        loss_of: dict[int, Tensor] = {}

        def forward(net: nn.Module) -> Tensor:
            loss, outputs = loss_and_outputs(closure, net, "elastic")
            loss_of[id(outputs)] = loss
            return outputs

        losses = self.joint.backward(forward=forward, loss=lambda outputs: loss_of[id(outputs)])
        values: dict[str, Tensor | float] = {"loss": losses.full, "loss_low": losses.low, "macs": losses.macs}
        return {name: value for name, value in values.items() if not math.isnan(float(value))}

    def state_dict(self) -> dict[str, Any]:
        """The generator of budgets, the bases, whose turn it is and the running norms."""
        return self.joint.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.joint.load_state_dict(state)


def _objective(network: WithExample, settings: Settings, macs: tuple[float, float]) -> JointObjective:
    own = settings.of(ElasticSettings)
    return JointObjective(
        network.model,
        form=settings.form,
        macs=macs,
        example_input=network.example_input,
        smallest=own.elastic_smallest,
        distill=own.elastic_distill,
        turns=own.elastic_turns,
        balance=settings.balance,
        criterion=settings.criterion,
        min_rank=settings.min_rank,
        refresh=own.elastic_refresh,
        seed=settings.seed,
    )
