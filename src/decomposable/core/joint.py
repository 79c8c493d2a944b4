"""One training step of the joint full- and low-rank objective: Algorithm 1 of the paper.

                 ┌─ full-rank network, W ────────────────→ loss ─→ ∇_f ───────────────────────────┐
    one batch ───┤                                                                                ├─→ .grad
                 └─ low-rank network, W̃ = truncate(W) ───→ loss ─→ ∇ (back through the SVD) ─→ ∇̂ ┘

    .grad += (1 − λ) ∇_f + λ ∇̂      with ∇̂ = ∇ · ‖∇_f‖/‖∇‖ for each decomposed weight, ∇̂ = ∇ for all else

The ranks of the low-rank network are those that a random ratio Z of all the bases of the network allows; a budget that
is drawn may take its place (`draws.py`). `networks.py` has the two passes. Elastic training is another step of the same
passes (`elastic/`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from decomposable.core.criteria import Criterion, ScoresByLayer
from decomposable.core.draws import DrawRatio, Range
from decomposable.core.forms import DEFAULT, FormOf
from decomposable.core.gradients import Gradient, accumulate, scaled
from decomposable.core.layers import FilterFn
from decomposable.core.networks import Losses, TwoNetworks, check_share, mixed
from decomposable.core.passes import Closure, LossSpec, Scaler
from decomposable.core.tracing import Forward
from decomposable_edge.sizing.order import Limits


class JointObjective(TwoNetworks):
    """Train a model, which stays as it is, by the joint objective (equation 1 and Algorithm 1).

    Args:
        model: any module; compiled ones and `DistributedDataParallel` too. Its parameters keep their names, any
            optimiser can step them.
        form: how convolutions become chains of layers, "spatial", "channel" or "tucker"; or by name pattern, the first
            that matches, as in ``{"layer4.*": "tucker", "*": "spatial"}``.
        ratio: (α_l, α_u), between which Z is drawn in every step, by default (0.01, 0.5); one number keeps Z fixed.
        balance: λ, the weight of the low-rank loss; 0 is plain training and skips the low-rank pass.
        criterion: "singular_value", "energy", "uniform", a function from singular values to scores, or scores that stay
            as they are, by layer: the `scores` of a network that `decompose` has ordered by data.
        min_rank: the smallest rank of any layer (the authors' code uses 5).
        limits: smallest and largest rank by name pattern, such as ``{"layer4.*": (8, None)}``.
        refresh: decompose every this many steps; in between, W is projected onto the bases kept. 1 is the paper's.
        filter_fn: ``filter_fn(module, name)`` says which layers take part; `skipped` names the others with a reason.
        seed: of the generator of Z; by default torch's initial seed.
        macs, params: in place of `ratio`, budgets as in ``resize_``, between which one is drawn log-uniformly; the
            low-rank network is the very one that ``resize_`` would make for it.
        example_input, forward: as in `decompose`: a batch that tells the sizes of the feature maps, for `macs`, and
            ``forward(net, batch)`` where calling ``net`` with its first entry is not right.
        added_gap: a constant that is added to σ_i² − σ_k² in the gradient, in place of clipping σ_k/σ_i (appendix A,
            where the paper shows why not).
        process_group: the processes that train this model together; by default the group of its
            `DistributedDataParallel`, or all processes of torch.distributed (docs/machines.md).

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> joint = JointObjective(model, ratio=(0.1, 0.5))
        >>> x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
        >>> losses = joint.backward(lambda net: nn.functional.cross_entropy(net(x), y))
        >>> model[0].weight.grad.shape, 0.1 <= losses.ratio <= 0.5
        (torch.Size([16, 8]), True)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        form: FormOf = DEFAULT,
        ratio: Range | float | None = None,
        balance: float = 0.5,
        criterion: str | Criterion | ScoresByLayer = "singular_value",
        min_rank: int = 1,
        limits: Limits | None = None,
        refresh: int = 1,
        filter_fn: FilterFn | None = None,
        seed: int | None = None,
        macs: Range | float | None = None,
        params: Range | float | None = None,
        example_input: Any = None,
        forward: Forward | None = None,
        added_gap: float = 0.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.balance = check_share("balance", balance)
        super().__init__(
            model,
            sizes={"ratio": ratio, "macs": macs, "params": params},
            form=form,
            criterion=criterion,
            min_rank=min_rank,
            limits=limits,
            refresh=refresh,
            filter_fn=filter_fn,
            seed=seed,
            example_input=example_input,
            forward=forward,
            added_gap=added_gap,
            process_group=process_group,
        )

    def backward(
        self,
        closure: Closure | None = None,
        scaler: Scaler | None = None,
        *,
        forward: Callable[[nn.Module], Any] | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        weight: float = 1.0,
        samples: int | None = None,
    ) -> Losses:
        """Compute both losses of one batch and add the joint gradient to every parameter's `.grad`.

        `closure(net)` returns the loss of the network it is given; it is called with the model and with its low-rank
        network, so everything else in it (the batch, the labels) is the same for both. In its place `forward` returns
        the outputs, of which `loss` makes a scalar. A `GradScaler` is passed here; step and update it as usual. The
        gradient is multiplied with `weight`: 1/n for the mean of n calls.

        With several processes, all of them call this equally often. The mean of their gradients is by how many
        `samples` each has, by default the length of the network's first input. One that has none this time says
        ``samples=0``; its closure is not called.
        """
        call = LossSpec.of(closure, forward, loss, weight=weight, samples=samples, is_alone=self.processes.is_alone)
        self.meet()
        drawn = self.draw()
        full = self.full_pass(call, scaler)
        if self.balance == 0:
            accumulate(scaled(full.gradient, 1.0))
            ratio = drawn if isinstance(self.sizes, DrawRatio) else math.nan
            return Losses.of_full(full.loss)._replace(ratio=ratio)
        decompositions = self.decompose()
        if decompositions is None:
            accumulate(scaled(full.gradient, 1.0))
            return Losses("full", full.loss, full.loss, 1.0)

        size = self.choose(decompositions, drawn)
        low = self.low_rank_pass(call, scaler, decompositions, size)
        accumulate(mixed(full, low, self.balance, self.layers))
        return Losses.of_low(size, low.loss, full.loss)

    def gradients(self, closure: Closure, *, samples: int | None = None) -> tuple[Gradient, Gradient]:
        """Return ∇_f and ∇ of one batch at the next size drawn, neither mixed nor rebalanced; no `.grad` changes."""
        call = LossSpec.of(closure, None, None, weight=1.0, samples=samples, is_alone=self.processes.is_alone)
        self.meet()
        drawn = self.draw()
        full = self.full_pass(call, None)
        decompositions = self._bases.of_current_weights()
        size = self.choose(decompositions, drawn)
        return full.gradient, self.low_rank_pass(call, None, decompositions, size).gradient
