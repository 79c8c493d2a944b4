"""Elastic training in the loop of a recipe: `elastic/` says what it is, and this only hands things over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from decomposable.core.distillation import kl_divergence
from decomposable.elastic import Elastic, ElasticOptions
from decomposable.elastic.options import CHECKS
from decomposable.elastic.order import IMAGES
from decomposable.network.decomposed import DecomposedNet
from decomposable.recipes.settings import Settings
from decomposable.recipes.values import Check, MethodSettings
from decomposable.training.methods.base import CalibrationData, Closure
from decomposable.training.methods.decomposable import Decomposable
from decomposable.training.methods.decomposing import calibrate_
from decomposable.training.methods.outputs import loss_and_outputs

_DEFAULT = ElasticOptions()
_SETTING = {
    **{each.name: f"elastic_{each.name}" for each in fields(ElasticOptions) if each.name != "balance"},
    "smallest_share": "elastic_smallest",
    "low_steps_per_full": "elastic_turns",
}
"""The setting of every option; `balance` is shared with the paper's method."""


@dataclass(frozen=True, kw_only=True)
class ElasticSettings(MethodSettings):
    """The `ElasticOptions` by the names that settings have."""

    elastic_macs: tuple[float, float] = _DEFAULT.macs
    elastic_smallest: float = _DEFAULT.smallest_share
    elastic_distill: float = _DEFAULT.distill
    elastic_turns: int | None = _DEFAULT.low_steps_per_full
    elastic_start: float | None = _DEFAULT.start
    elastic_even: float = _DEFAULT.even
    elastic_refresh: int = _DEFAULT.refresh
    elastic_order: str | None = _DEFAULT.order

    checks: ClassVar[tuple[Check, ...]] = tuple(
        ((_SETTING[name],), allowed, is_right) for name, allowed, is_right in CHECKS if name in _SETTING
    )

    def options(self, balance: float) -> ElasticOptions:
        """Return them by their own names."""
        return ElasticOptions(balance=balance, **{name: getattr(self, key) for name, key in _SETTING.items()})


class ForElastic(nn.Module):
    """The recipe's model, with what `Elastic` is told of it; and that object, once there is a step."""

    example_input: Tensor
    elastic: Elastic

    def __init__(self, model: nn.Module, example_input: Tensor, *, is_trained: bool) -> None:
        super().__init__()
        self.model, self.is_trained = model, is_trained
        self.register_buffer("example_input", example_input[:1].clone(), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)


class ElasticStep:
    """A step of `Elastic`, for the loop."""

    images = IMAGES

    def __init__(self, elastic: Elastic) -> None:
        self.elastic = elastic
        self._samples: int | None = None  # as the network's input tells

    @property
    def refresh(self) -> int:
        """Return how many steps share the bases that the first of them computes."""
        return self.elastic.options.refresh

    @property
    def steady(self) -> float:
        """Return the part of the training until which the rate stays at its highest."""
        return self.elastic.steady

    def look_at(self, material: CalibrationData) -> None:
        """Let these images say the order of the bases."""
        self.elastic.data, self.elastic.progress = material.calibration, material.progress

    def at(self, step: int, steps: int) -> None:
        """Say which step of how many is next."""
        self.elastic.step, self.elastic.steps = step, steps

    def has_samples(self, count: int) -> None:
        """Say how many the next batch has: the gradients are averaged by them before they are mixed."""
        self._samples = count

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the gradient of the network whose turn it is, or of both; a loss that was not computed is not logged."""
        if self.elastic.options.distill:

            def forward(net: nn.Module) -> Any:
                return loss_and_outputs(closure, net, "elastic", "or elastic_distill=0")

            result = self.elastic.backward(forward=forward, loss=lambda found: found[0], samples=self._samples)
        else:
            result = self.elastic.backward(forward=closure, loss=lambda found: found, samples=self._samples)
        return {name: value for name, value in result.seen().items() if name in ("loss", "loss_low", "macs")}

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on."""
        return self.elastic.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state."""
        self.elastic.load_state_dict(state)


def _distance(low: tuple[Tensor, Tensor], full: tuple[Tensor, Tensor]) -> Tensor:
    """Return KL(full ‖ low) of what two networks say, beside their losses."""
    return kl_divergence(low[1], full[1])


class ElasticMethod(Decomposable):
    """The model as it is, trained at random budgets and decomposed after training."""

    name = "elastic"
    summary = "Decomposable-Net at random budgets, taught by the full network, in turns: better when small, for less"
    label = "Elastic"
    settings = ElasticSettings

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> ForElastic:
        """Return the model, with the input that its costs are told by."""
        return ForElastic(model, example_input, is_trained=is_trained)

    def step(self, network: nn.Module, settings: Settings) -> ElasticStep:
        """Return one of the two networks in each step, or both."""
        assert isinstance(network, ForElastic)
        options = settings.of(ElasticSettings).options(settings.balance)
        network.elastic = Elastic(
            network.model,
            example_input=network.example_input,
            steps=1,  # the loop says how many
            from_scratch=not network.is_trained,
            options=options,
            distance=_distance if options.distill else None,
            form=settings.form,
            criterion=settings.criterion,
            min_rank=settings.min_rank,
            seed=settings.seed,
        )
        return ElasticStep(network.elastic)

    def sized(self, network: nn.Module, material: CalibrationData, settings: Settings) -> DecomposedNet:
        """Return the network by the form and the order that it was trained with, calibrated."""
        assert isinstance(network, ForElastic)
        net = network.elastic.decompose()
        calibrate_(net, material, settings)
        return net


METHOD = ElasticMethod()
