"""Decomposable-Net with budgets, distillation and turns: better small networks than the paper's, for less.

A low-rank network of a random part of the MACs learns from the full network's outputs (`joint.py`; docs/training.md
says what each of these is worth). From trained weights the two take turns: there are three low-rank steps after each
full one, and at the end one, so that the full network settles, too. From scratch, the first half of the training is
plain, because a low-rank network has little to learn from weights that are still random; in the second half every step
has both networks, and only there does the learning rate fall: small steps would teach small networks little. That is
0.6 of the passes of the paper's training from trained weights, and 0.75 from scratch.

From trained weights the ranks of a budget follow the current singular values, as in the paper. From scratch they are
settled once, when the low-rank steps begin: what a cut of each layer costs then, by images of the training, is the
order of all sizes from there on (`scores_by_data`), so that a small network is the same one to the end.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from decomposable.core.criteria import Scores, ScoresByLayer
from decomposable.core.distillation import kl_divergence
from decomposable.core.joint import JointObjective
from decomposable.core.moments import NoGradientError
from decomposable.core.tracing import on_device_of
from decomposable.network.decompose import decompose
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.importance import require_one_cut
from decomposable.recipes.settings import Settings
from decomposable.recipes.values import Check, MethodSettings
from decomposable.training.methods.base import CalibrationData, Closure
from decomposable.training.methods.decomposable import Decomposable, JointStep
from decomposable.training.methods.decomposing import decomposed
from decomposable.training.methods.outputs import loss_and_outputs
from decomposable_edge.errors import BudgetError, InvalidArgumentError

TURNS = 3
"""Low-rank steps after each full one where the weights are trained already; from scratch, both in each step."""


BY_DATA, BY_WEIGHTS = "data", "weights"
"""Where the order of the bases comes from: images, once; or the criterion in each step, as in the paper."""

IMAGES = 250
"""So many, in whole batches, say it: for the order alone, more add little (docs/cut.md#how-many-images)."""

NEVER = 1e300
"""The score of a basis that is not to be cut off, above all that are measured."""


@dataclass(frozen=True, kw_only=True)
class ElasticSettings(MethodSettings):
    """How the low-rank network is drawn and taught; `balance` (λ) is shared with the paper's method."""

    elastic_macs: tuple[float, float] = (0.08, 0.5)  # parts of the MACs, between which a budget is drawn
    elastic_smallest: float = 0.0  # the share of low-rank steps that take the smallest of them
    elastic_distill: float = 0.5  # how much the low-rank network learns from the full one, and not from the labels
    elastic_turns: int | None = None  # low-rank steps after each full one: 3, or 0 from scratch: both in each step
    elastic_start: float = 0.5  # the part of a training from scratch after which there are low-rank steps
    elastic_even: float = 0.6  # the part of what is left after which there is one low-rank step after each full one
    elastic_refresh: int = 8  # low-rank steps from one SVD to the next
    elastic_order: str | None = None  # of the bases: by data, once, or by weights, in each step (`_order_of`)

    before: ClassVar[Mapping[str, Any]] = {"elastic_order": BY_WEIGHTS}
    checks: ClassVar[tuple[Check, ...]] = (
        (("elastic_macs",), "two numbers with 0 < low <= high <= 1, as in 0.08,0.5", lambda v: 0 < v[0] <= v[1] <= 1),
        (("elastic_smallest",), "a number from 0 to below 1", lambda v: 0 <= v < 1),
        (("elastic_distill",), "a number in [0, 1]", lambda v: 0 <= v <= 1),
        (("elastic_turns",), "an int of at least 0, or none", lambda v: v is None or v >= 0),
        (("elastic_start", "elastic_even"), "a part of the training from 0 to 1", lambda v: 0 <= v <= 1),
        (("elastic_refresh",), "an int of at least 1", lambda v: v >= 1),
        (("elastic_order",), f"{BY_DATA}, {BY_WEIGHTS}, or none", lambda v: v in (BY_DATA, BY_WEIGHTS, None)),
    )


class WithExample(nn.Module):
    """The recipe's model, one input of it, whether its weights were trained before, and the order of its bases.

    `scores` are None until there is an order by data, and where there is to be none.
    """

    example_input: Tensor
    scores: ScoresByLayer | None = None

    def __init__(self, model: nn.Module, example_input: Tensor, *, is_trained: bool) -> None:
        super().__init__()
        self.model, self.is_trained = model, is_trained
        self.register_buffer("example_input", example_input[:1].clone(), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model."""
        return self.model(*args, **kwargs)


class ElasticStep(JointStep):
    """A full-rank step, a low-rank one, or one of both; which part of the training has which, `at` knows."""

    images = IMAGES

    def __init__(
        self, joint: JointObjective, network: WithExample, settings: Settings, *, start: float, even: float, order: str
    ) -> None:
        super().__init__(joint)
        self.network, self.settings = network, settings
        self.start, self.even, self.order = start, even, order
        self._balance, self._turns = joint.balance, joint.turns
        self._material: CalibrationData | None = None

    def look_at(self, material: CalibrationData) -> None:
        """With these images the order of the bases is found, where data say it."""
        self._material = material

    @property
    def steady(self) -> float:
        """The rate begins to fall with the first low-rank step; where there is none, as in any training."""
        return self.start if self.start < 1 else 0.0

    def at(self, done: float) -> None:
        """Before `start`, steps are plain, and there the order is found; after `even`, both networks have as many."""
        if done >= self.start and self.order == BY_DATA and self.network.scores is None and self._material:
            self._settle(self._material)
        self.joint.balance = self._balance if done >= self.start else 0.0
        self.joint.turns = min(1, self._turns) if done >= self.even else self._turns

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Add the gradient of the network whose turn it is, or of both; a loss that was not computed is not logged."""
        if self.joint.distill:
            losses = self.joint.backward(
                forward=lambda net: loss_and_outputs(closure, net, "elastic", "or elastic_distill=0"),
                loss=lambda found: found[0],
                samples=self._samples,
            )
        else:
            losses = self.joint.backward(closure, samples=self._samples)
        has_low = not math.isnan(losses.macs)
        values: dict[str, Tensor | float] = {} if self.joint.turns and has_low else {"loss": losses.full}
        return {**values, "loss_low": losses.low, "macs": losses.macs} if has_low else values

    def _settle(self, material: CalibrationData) -> None:
        """Go by what the images say to the end, in training and afterwards; where they say nothing, by the weights."""
        scores: dict[str, tuple[Scores, ...]] | None = None
        why = "it is no better on samples that were kept out"
        try:
            scores = scores_by_data(self.joint, self.network.model, self.settings, material)
        except InvalidArgumentError as error:
            why = str(error)
        if scores is None:
            warnings.warn(f"elastic_order={BY_DATA} is not taken, the weights say the order: {why}", stacklevel=2)
            self.order = BY_WEIGHTS
        else:
            self.joint.criterion = self.network.scores = scores

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state, in the order that was settled."""
        super().load_state_dict(state)
        if isinstance(self.joint.criterion, Mapping):
            self.network.scores = self.joint.criterion


def scores_by_data(
    joint: JointObjective, model: nn.Module, settings: Settings, material: CalibrationData
) -> dict[str, tuple[Scores, ...]] | None:
    """What every basis of the model as it is now is worth by what data say; what is not decomposed is never cut.

    The loss of the network says it where the network gives logits, else its output; where there are no gradients, every
    layer's output. None where data know nothing better than the weights.
    """
    batch = on_device_of(model, material.example_input)
    by_data = partial(
        decompose,
        model,
        batch,
        form=settings.form,
        data=material.calibration,
        min_rank=settings.min_rank,
        progress=material.progress,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="data: on ")  # who asks says it
        try:
            net = by_data()
        except NoGradientError:  # a part of the model runs without
            net = by_data(criterion="output")
    if net.cut_report is not None and net.cut_report.kept == "weights":
        return None
    never = {layer.name: tuple(np.full(rank, NEVER) for rank in layer.full_ranks) for layer in joint.layers}
    return {**never, **{name: cuts for name, cuts in net.scores.items() if name in never}}


def _distance(low: tuple[Tensor, Tensor], full: tuple[Tensor, Tensor]) -> Tensor:
    """KL(full ‖ low) of what two networks say, beside their losses."""
    return kl_divergence(low[1], full[1])


class Elastic(Decomposable):
    """The model as it is, trained at random budgets and decomposed after training."""

    name = "elastic"
    summary = "Decomposable-Net at random budgets, taught by the full network, in turns: better when small, for less"
    label = "Elastic"
    settings = ElasticSettings

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> WithExample:
        """The model, with the input that its costs are told by."""
        return WithExample(model, example_input, is_trained=is_trained)

    def step(self, network: nn.Module, settings: Settings) -> ElasticStep:
        """One of the two networks in each step."""
        assert isinstance(network, WithExample)
        own = settings.of(ElasticSettings)
        low, high = own.elastic_macs
        try:
            joint = _objective(network, settings, (low, high))
        except BudgetError as error:
            if error.smallest is None:
                raise
            # A network that cannot be so small is trained for the smallest size that it can have.
            joint = _objective(network, settings, (error.smallest, max(high, error.smallest)))
        start = 0.0 if network.is_trained else own.elastic_start
        even, order = start + (1 - start) * own.elastic_even, _order_of(joint, network, settings)
        return ElasticStep(joint, network, settings, start=start, even=even, order=order)

    def sized(self, network: nn.Module, material: CalibrationData, settings: Settings) -> DecomposedNet:
        """Decomposed by the form and the order that it was trained with."""
        assert isinstance(network, WithExample)
        return decomposed(network.model, material, settings, scores=network.scores)


def _order_of(joint: JointObjective, network: WithExample, settings: Settings) -> str:
    """By whom the bases are put in order.

    By data where the training is from scratch. From trained weights their own singular values were better on a
    ResNet-20 (results/README.md#elastic-training), and an order by data is not known for chains of several cuts.
    """
    asked = settings.of(ElasticSettings).elastic_order
    if asked == BY_DATA:
        require_one_cut(joint.layers)
        if settings.criterion != "singular_value":
            raise InvalidArgumentError(
                f"elastic_order={BY_DATA} and criterion={settings.criterion}: each is an order; allowed: one of them"
            )
    if asked is not None:
        return asked
    has_one_cut = all(len(layer.full_ranks) == 1 for layer in joint.layers)
    is_usual = settings.criterion == "singular_value" and has_one_cut and not network.is_trained
    return BY_DATA if is_usual else BY_WEIGHTS


def _objective(network: WithExample, settings: Settings, macs: tuple[float, float]) -> JointObjective:
    own = settings.of(ElasticSettings)
    turns = (TURNS if network.is_trained else 0) if own.elastic_turns is None else own.elastic_turns
    return JointObjective(
        network.model,
        form=settings.form,
        macs=macs,
        example_input=network.example_input,
        smallest=own.elastic_smallest,
        distill=own.elastic_distill,
        distance=_distance if own.elastic_distill else None,
        turns=turns or False,
        balance=settings.balance,
        criterion=settings.criterion,
        min_rank=settings.min_rank,
        refresh=own.elastic_refresh,
        seed=settings.seed,
    )


METHOD = Elastic()
