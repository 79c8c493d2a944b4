"""Elastic training: better small networks than the paper's, for less work.

A low-rank network of a random part of the MACs learns from the labels and from the full network's outputs. It shares
every weight with the full one (`core/networks.py`). Which of the two a step has, changes on the way:

    from trained weights   full, low, low, low, full, low, low, low, …          full, low, full, low, …
    from scratch           full, full, full, … │ order by data │ both, both, both, …     (short: both, both, both, …)

From trained weights the two take turns, so that a step is one pass. The last part has as many of both, so that the full
network settles, too. From scratch, the first half is plain, because a low-rank network has little to learn from weights
that are still random; a short training has fewer plain steps or none. Only after them does the learning rate fall:
small steps would teach small networks little. That is 0.6 of the passes of the paper's training from trained weights,
and 0.75 or more from scratch.

From trained weights the ranks of a budget follow the current singular values, as in the paper. From scratch the order
of all bases is settled once, after the plain steps (`order.py`), so that a small network is the same one to the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from decomposable.core.criteria import Criterion, ScoresByLayer
from decomposable.core.distillation import Distance, Distillation, detached
from decomposable.core.forms import DEFAULT, FormOf
from decomposable.core.gradients import RunningNorms, accumulate, scaled
from decomposable.core.layers import FilterFn
from decomposable.core.networks import Losses, TwoNetworks, mixed, refusing_states
from decomposable.core.passes import LossSpec, Scaler
from decomposable.core.tracing import Forward
from decomposable.core.tree import unwrap
from decomposable.elastic.options import (
    BY_DATA,
    BY_WEIGHTS,
    LOW_STEPS_PER_FULL,
    WARMUP,
    ElasticOptions,
    default_start,
    rate_factor,
)
from decomposable.elastic.order import Call, call_again, kept_calls, settled
from decomposable.network.decompose import decompose
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.importance import require_one_cut
from decomposable.progress import Report, quiet
from decomposable_edge.checks import check_count
from decomposable_edge.errors import BudgetError, InvalidArgumentError
from decomposable_edge.sizing.order import Limits


class Elastic:
    """Train a model, which stays as it is, for all its sizes, in a loop of your own.

    Args:
        model: any module, its weights trained or fresh; as of `JointObjective`.
        example_input: a batch that tells the sizes of the feature maps, as in `decompose`.
        steps: how many calls of `backward` the training has.
        from_scratch: whether the weights are fresh.
        data: batches of a few hundred training samples, without labels, that say the order of the bases from scratch.
            By default those of the last steps before it is needed.
        options: budgets, distillation, phases: everything that has a number.
        forward: ``forward(net, batch)`` where calling ``net`` with the first entry of a batch is not right.
        distance: ``distance(low, full)`` of the outputs in place of the KL divergence of their softmax.
        form, criterion, min_rank, limits, filter_fn, seed, process_group: as of `JointObjective`.
        progress: called with lines about how far a settling of the order is.

    Attributes:
        step: how many calls there were.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
        >>> elastic = Elastic(model, example_input=x, steps=4)
        >>> optimizer = torch.optim.SGD(elastic.parameters(), lr=0.01)
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     result = elastic.backward(forward=lambda net: net(x), loss=lambda out: F.cross_entropy(out, y))
        ...     optimizer.step()
        >>> result.ran, 0 < result.macs <= 0.5
        ('low', True)
        >>> net = elastic.finish([x])
        >>> net.resize_(macs=0.3).macs <= 0.3 * net.plan().full_macs
        True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        example_input: Any,
        steps: int,
        from_scratch: bool = False,
        data: Iterable[Any] | None = None,
        options: ElasticOptions | None = None,
        forward: Forward | None = None,
        distance: Distance | None = None,
        form: FormOf = DEFAULT,
        criterion: str | Criterion | ScoresByLayer = "singular_value",
        min_rank: int = 1,
        limits: Limits | None = None,
        filter_fn: FilterFn | None = None,
        seed: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        progress: Report = quiet,
    ) -> None:
        self.model, self.steps, self.step = model, check_count("steps", steps), 0
        self.options = options = options or ElasticOptions()
        self.data, self.progress = data, progress
        self.distillation = Distillation.of(options.distill, distance)
        self._as_decompose: dict[str, Any] = {
            "form": form,
            "filter_fn": filter_fn,
            "min_rank": min_rank,
            "limits": limits,
        }
        self._example, self._forward = example_input, forward

        def networks(macs: tuple[float, float]) -> TwoNetworks:
            return TwoNetworks(
                model,
                sizes={"macs": macs},
                smallest_share=options.smallest_share,
                criterion=criterion,
                refresh=options.refresh,
                seed=seed,
                example_input=example_input,
                forward=forward,
                process_group=process_group,
                **self._as_decompose,
            )

        low, high = options.macs
        try:
            self.networks = networks((low, high))
        except BudgetError as error:
            if error.smallest is None:
                raise
            # A network that cannot be so small is trained for the smallest size that it can have.
            self.networks = networks((error.smallest, max(high, error.smallest)))
        self._from_scratch = from_scratch
        by_default = 0 if from_scratch else LOW_STEPS_PER_FULL
        self._low_steps = by_default if options.low_steps_per_full is None else options.low_steps_per_full
        self.order = self._order_of(criterion, from_scratch)
        self._norms = RunningNorms(self.networks.layers)
        self._low_steps_left = 0  # until the full network's next
        self._seen: list[Call] = []  # what the model was called with in the last plain steps

    def _order_of(self, criterion: str | Criterion | ScoresByLayer, from_scratch: bool) -> str:
        """Return by whom the bases are put in order.

        From trained weights their own singular values were better on a ResNet-20 (results/README.md#elastic-training),
        and an order by data is not known for chains of several cuts.
        """
        asked, is_usual = self.options.order, criterion == "singular_value"
        if asked == BY_DATA:
            require_one_cut(self.networks.layers)
            if not is_usual:
                came = criterion if isinstance(criterion, str) else "one of your own"
                raise InvalidArgumentError(
                    f"order={BY_DATA} and criterion={came}: each is an order; allowed: one of them"
                )
        if asked is not None:
            return asked
        has_one_cut = all(len(layer.full_ranks) == 1 for layer in self.networks.layers)
        return BY_DATA if is_usual and has_one_cut and from_scratch else BY_WEIGHTS

    @property
    def start(self) -> float:
        """Return the part of the training after which there are low-rank steps."""
        if not self._from_scratch:
            return 0.0
        return default_start(self.steps) if self.options.start is None else self.options.start

    @property
    def even(self) -> float:
        """Return the part of the training after which one low-rank step follows each full one."""
        return self.start + (1 - self.start) * self.options.even

    @property
    def scores(self) -> ScoresByLayer | None:
        """Return what the bases are worth, where that is settled; None where the weights of each step say it."""
        criterion = self.networks.criterion
        return criterion if isinstance(criterion, Mapping) else None

    @property
    def steady(self) -> float:
        """Return the part of the training until which the learning rate is highest: it falls with low-rank steps."""
        return self.start if self.start < 1 else 0.0

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return what is to be trained."""
        return unwrap(self.model).parameters()

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step as a part of the highest one, for `LambdaLR`: the schedule that it was found with.

        >>> import torch
        >>> x, model = torch.zeros(1, 8), nn.Linear(8, 8)
        >>> elastic = Elastic(model, example_input=x, steps=2000, from_scratch=True)
        >>> [round(elastic.learning_rate(step), 2) for step in (0, 120, 1000, 1500, 2000)]
        [0.01, 0.96, 1.0, 0.5, 0.0]
        """
        return rate_factor(step, self.steps, warmup=WARMUP * self.steps, steady=self.steady)

    def backward(
        self,
        *,
        forward: Callable[[nn.Module], Any],
        loss: Callable[[Any], Tensor],
        samples: int | None = None,
        weight: float = 1.0,
        scaler: Scaler | None = None,
    ) -> Losses:
        """Add the gradient of one batch to every parameter's `.grad`, and say what ran.

        `forward(net)` returns the outputs of the network that it is given, and `loss(outputs)` makes a scalar of them.
        `weight`, `samples` and `scaler` are as of `JointObjective.backward`.
        """
        networks = self.networks
        call = LossSpec.of(None, forward, loss, weight=weight, samples=samples, is_alone=networks.processes.is_alone)
        networks.meet()
        done = self.step / self.steps
        if done < self.start or self.options.balance == 0:
            result = self._plain_step(call, scaler)
        else:
            self._settle_order()
            low_steps = self._low_steps if done < self.even else min(1, self._low_steps)
            if not low_steps:
                result = self._step_of_both(call, scaler)
            elif self._low_steps_left > 0:
                result = self._low_step(call, scaler)
                self._low_steps_left -= 1
            else:
                result = self._full_step(call, scaler, 2 * (1 - self.options.balance))
                self._low_steps_left = low_steps
        self.step += 1
        return result

    def _plain_step(self, call: LossSpec, scaler: Scaler | None) -> Losses:
        """Add ∇_f."""
        self.networks.draw()  # a size belongs to each step, whether it is used or not
        left = math.ceil(self.start * self.steps) - self.step
        is_watched = self.order == BY_DATA and self.data is None and self.networks.processes.is_first
        with kept_calls(self.networks.full_network, self._seen, left) if is_watched else nullcontext():
            full = self.networks.full_pass(call, scaler)
        accumulate(scaled(full.gradient, 1.0))
        return Losses.of_full(full.loss)

    def _full_step(self, call: LossSpec, scaler: Scaler | None, share: float) -> Losses:
        """Add 2 (1 − λ) ∇_f, or another share of it, and take in its norms."""
        full = self.networks.full_pass(call, scaler)
        self._norms.update(full.gradient, call.scale(scaler, full.loss))
        accumulate(scaled(full.gradient, share))
        return Losses.of_full(full.loss)

    def _low_step(self, call: LossSpec, scaler: Scaler | None) -> Losses:
        """Add 2 λ ∇̂, with ∇ scaled to a running mean of ‖∇_f‖."""
        networks, drawn = self.networks, self.networks.draw()
        decompositions = networks.decompose()
        if decompositions is None:
            return self._full_step(call, scaler, 1.0)
        size = networks.choose(decompositions, drawn)
        if self.distillation.share > 0 and not networks.is_whole(size):  # a full network cannot teach itself
            outputs = networks.processes.together(lambda: networks.outputs_of_full(call))
            low_call = self.distillation.taught(call, outputs)
        else:
            low_call = call
        low = networks.low_rank_pass(low_call, scaler, decompositions, size)
        accumulate(self._norms.rebalanced(low.gradient, 2 * self.options.balance, call.scale(scaler, low.loss)))
        return Losses.of_low(size, low.loss)

    def _step_of_both(self, call: LossSpec, scaler: Scaler | None) -> Losses:
        """Add (1 − λ) ∇_f + λ ∇̂, as the paper does; the full network's outputs teach the low-rank one."""
        networks, drawn = self.networks, self.networks.draw()
        outputs: list[Any] = []

        def noted(found: Any) -> Tensor:
            outputs.append(detached(found))
            return call.loss(found)

        is_distilled = self.distillation.share > 0
        full = networks.full_pass(call._replace(loss=noted) if is_distilled else call, scaler)
        decompositions = networks.decompose()
        if decompositions is None:
            accumulate(scaled(full.gradient, 1.0))
            return Losses.of_full(full.loss)
        size = networks.choose(decompositions, drawn)
        has_teacher = outputs and not networks.is_whole(size)
        low_call = self.distillation.taught(call, outputs[-1]) if has_teacher else call
        low = networks.low_rank_pass(low_call, scaler, decompositions, size)
        accumulate(mixed(full, low, self.options.balance, networks.layers))
        return Losses.of_low(size, low.loss, full.loss)

    def _settle_order(self) -> None:
        """Go by what data say to the end, in training and afterwards; where they say nothing, by the weights."""
        if self.order != BY_DATA or self.scores is not None:
            return
        if self.start == 0 and self.options.order is None:
            self.order = BY_WEIGHTS  # data say nothing of weights that are still random
            return
        data, forward, example = self.data, self._forward, self._example
        if data is None and self._seen:
            data, forward, example = self._seen, call_again, self._seen[0]
        networks = self.networks
        scores = settled(
            unwrap(networks.full_network),
            networks.layers,
            () if data is None else data,
            networks.processes,
            example_input=example,
            forward=forward,
            progress=self.progress,
            **self._as_decompose,
        )
        self._seen = []
        if scores is None:
            self.order = BY_WEIGHTS
        else:
            networks.criterion = scores

    def decompose(self) -> DecomposedNet:
        """Return the network of all sizes as the model is now, its bases in the order that was trained."""
        return decompose(
            unwrap(self.networks.full_network),
            self._example,
            criterion=self.networks.criterion,
            forward=self._forward,
            **self._as_decompose,
        )

    def finish(self, loader: Iterable[Any], *, progress: Report | None = None) -> DecomposedNet:
        """Return that network calibrated, ready to resize, save and export; the loader is that of `calibrate_`."""
        net = self.decompose()
        net.calibrate_(loader, progress=progress)
        return net

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed training needs to repeat exactly, beside the model and the optimiser."""
        return {
            "step": self.step,
            "order": self.order,
            "networks": self.networks.state_dict(),
            "low_steps_left": self._low_steps_left,
            "norms": self._norms.state_dict(),
            "seen": list(self._seen),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same training."""
        norms = RunningNorms(self.networks.layers)
        with refusing_states():  # all is read before anything changes
            norms.load_state_dict(state["norms"])
            counts, order, seen = (state["step"], state["low_steps_left"]), state["order"], list(state["seen"])
            networks = state["networks"]
        if any(type(count) is not int or count < 0 for count in counts) or order not in (BY_DATA, BY_WEIGHTS):
            raise InvalidArgumentError.about(
                "state", f"steps {counts!r:.40}, order {order!r:.40}", "what state_dict() returned"
            )
        self.networks.load_state_dict(networks)
        self.step, self._low_steps_left = counts
        self._norms, self._seen, self.order = norms, seen, order
