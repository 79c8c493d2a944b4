"""The bases of a trained network and their order, by what a cut loses on data: `decompose(data=…)`.

A metric tells what a layer's cut loses while all else stays as it is (`core/metric.py`). That is right for a small cut,
and too optimistic for a large one, where what is lost upstream changes what comes downstream. So it is measured again
on the way down:

    measure the network ─▶ bases and losses in that metric ─▶ order by loss per MAC ─▶ cut to the next size ─▶ measure …

How much the losses of one layer count beside those of another is found on images, for every such step
(`allocation.py`).
Bases that a cut has dropped stay behind all others, and those that it kept are turned among themselves: a size contains
every smaller one, as ever.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decomposable.core.factors import Factors, like_weight
from decomposable.core.forms import MATRIX_FORMS, matrix_form, to_matrix, to_weight
from decomposable.core.layers import Layer
from decomposable.core.metric import InMetric, Product, decompose_in_metric
from decomposable.core.moments import Loss, passes, second_moments
from decomposable.core.svd import most_precise
from decomposable.core.tracing import Forward
from decomposable.errors import InvalidArgumentError
from decomposable.network.allocation import Judge, best_exponent, logits_in, shared_out
from decomposable.network.calibration.batches import length_of
from decomposable.network.calibration.statistics import averaged, tracked_batch_norms
from decomposable.progress import Progress, Report, Tracker
from decomposable.sizing.chain import ranks_of
from decomposable.sizing.ranks import RankSelector
from decomposable.sizing.worth import worth

BY_DATA = ("loss", "output")
"""Criteria that need data: what is lost of the network's loss, or of every layer's output."""

CERTAIN = (
    "criterion='loss': the network is certain of every image, so that no gradient comes back to any layer; its bases "
    "are ordered by what their layers' outputs lose"
)

SIZES = (0.5, 0.25, 0.12)
"""Parts of the network at which it is measured again."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class Order:
    """Every layer's factors, best basis first, and the selector that knows the order of all of them."""

    factors: Mapping[str, Factors]
    selector: RankSelector


def order_by_data(
    base: nn.Module,
    layers: Sequence[Layer],
    selector: RankSelector,
    batches: Iterable[Any],
    forward: Forward,
    *,
    by_loss: bool,
    sizes: Sequence[float] = SIZES,
    report: Report,
) -> Order:
    """Bases by the loss that their going causes, or by the change of their layer's output, relative to that output.

    The network's weights and statistics are written to meanwhile, and as before afterwards.
    """
    goals = [size for size in sizes if size > selector.smallest_size]
    seen = _counter(batches, (1 + len(goals)) * len(passes(layers, with_gradients=by_loss)), report)
    cuts = {layer.name: _Cut.of(layer) for layer in layers}
    judge = Judge.of(base, batches, forward) if by_loss else None
    exponent = 0.0 if by_loss else 1.0
    with _restored(base, layers):
        for goal in (*goals, None):
            losses = _measured(base, layers, cuts, batches, forward, drawn_loss if by_loss else None, seen)
            if by_loss and not any(each.any() for each in losses.values()):
                warnings.warn(CERTAIN, stacklevel=5)  # at who called decompose
                losses = _measured(base, layers, cuts, batches, forward, None, seen)
            for size in _on_the_way(goal, goals, selector.smallest_size):
                if judge is not None:
                    report(Progress("measuring", f"sharing out a cut to {size:.2g} of the MACs among the layers"))
                    exponent = _best_exponent(base, layers, cuts, losses, selector, size, judge, exponent)
                selector = _ordered(selector, cuts, losses, exponent)
                for name, rank in selector.choose(macs=size).ranks.items() if goal is not None else ():
                    cuts[name].drop(*ranks_of(rank))
            if goal is not None:
                _write_(layers, {name: one.kept for name, one in cuts.items()}, cuts)
                if tracked_batch_norms(base):
                    report(Progress("measuring", f"statistics of the network at {goal:.2g} of the MACs"))
                    averaged([lambda: base], forward, batches, asker="decompose")  # which leaves them in the network
    return Order({layer.name: cuts[layer.name].factors(layer) for layer in layers}, selector)


def _measured(
    base: nn.Module,
    layers: Sequence[Layer],
    cuts: Mapping[str, _Cut],
    batches: Iterable[Any],
    forward: Forward,
    loss: Loss | None,
    seen: Callable[[], None],
) -> dict[str, Numbers]:
    """Turn every layer's bases into those of its metric; what leaving out each of them loses."""
    losses: dict[str, Numbers] = {}
    for moments in second_moments(base, layers, batches, forward, loss, seen=seen):
        found = decompose_in_metric({name: cuts[name].what_is_kept for name in moments}, moments)
        losses |= {name: cuts[name].turn(bases) for name, bases in found.items()}
        del moments, found  # before the next pass needs the memory
    return losses


def require_one_cut(layers: Sequence[Layer]) -> None:
    """Refuse layers whose chain has several cuts: the metric is that of a matrix."""
    for layer in layers:
        if len(layer.full_ranks) > 1:
            raise InvalidArgumentError(
                f"layer '{layer.name}': form={layer.form!r} with bases by data; allowed: "
                f"{', '.join(map(repr, MATRIX_FORMS))}, or a criterion by the weights alone, such as 'singular_value'"
            )


def _on_the_way(goal: float | None, goals: Sequence[float], smallest: float) -> tuple[float, ...]:
    """The sizes that a cut is shared out anew for, from where the network was measured to the next goal: half-way, by
    the logarithm, and there. Cuts down to the first goal are small; behind the last one is the smallest that there is.
    """
    steps = (1.0, *goals, smallest)
    place = len(goals) if goal is None else goals.index(goal)
    half_way = (steps[place] * steps[place + 1]) ** 0.5
    return (half_way,) if goal is None else (goal,) if place == 0 else (half_way, goal)


def _best_exponent(
    base: nn.Module,
    layers: Sequence[Layer],
    cuts: Mapping[str, _Cut],
    losses: Mapping[str, Numbers],
    selector: RankSelector,
    wanted: float,
    judge: Judge,
    start: float,
) -> float:
    """That by which the network of the wanted size is nearest to the full one."""

    def distance(exponent: float) -> float:
        plan = _ordered(selector, cuts, losses, exponent).choose(macs=wanted)
        _write_(layers, {name: min(*ranks_of(rank), cuts[name].kept) for name, rank in plan.ranks.items()}, cuts)
        return judge.distance(base)

    return best_exponent(distance, start)


@dataclass(eq=False)
class _Cut:
    """The bases of one layer: those that are kept, best first, and behind them those that went, in that order."""

    p: Tensor
    q: Tensor
    scores: Numbers  # of those that went; of those that are kept, so far
    kept: int

    @classmethod
    def of(cls, layer: Layer) -> _Cut:
        """W = W · 1 or 1 · W, with as few bases as that can have."""
        w_MN = to_matrix(layer.weight.detach(), layer.form)
        w_MN = (w_MN.cpu() if most_precise(w_MN.device) != torch.float64 else w_MN).double()
        rows, columns = w_MN.shape
        one = torch.eye(min(rows, columns), dtype=w_MN.dtype, device=w_MN.device)
        p, q = (w_MN, one) if columns <= rows else (one, w_MN)
        return cls(p.clone(), q.clone(), np.zeros(len(q)), len(q))

    @property
    def is_whole(self) -> bool:
        return self.kept == len(self.q)

    @property
    def what_is_kept(self) -> Product:
        return Product(self.p[:, : self.kept], self.q[: self.kept])

    def factors(self, layer: Layer) -> Factors:
        """The weights of the two stages."""
        return like_weight(layer, matrix_form(layer.form).stages_of(self.p, self.q, layer.shape))

    def turn(self, bases: InMetric) -> Numbers:
        """Others that span the same, in the place of those that are kept; what leaving out each of them loses."""
        self.p[:, : self.kept], self.q[: self.kept] = bases.p, bases.q
        losses: Numbers = bases.losses.cpu().numpy()
        return losses

    def drop(self, rank: int) -> None:
        """Bases beyond this rank are gone."""
        self.kept = min(self.kept, rank)


def _ordered(
    selector: RankSelector, cuts: Mapping[str, _Cut], losses: Mapping[str, Numbers], exponent: float
) -> RankSelector:
    """The selector with the order by loss per MAC and, for budgets of parameters, the one per parameter.

    Bases that are kept score their worth, but more than all that went before.
    """
    kept = {name: each[: cuts[name].kept] for name, each in shared_out(losses, exponent).items()}
    worths = {
        cost.name: worth(
            kept[cost.name], per_rank=cost.chain("macs", (1,)), dense=cost.dense_macs, is_whole=cuts[cost.name].is_whole
        )
        for cost in selector.costs
    }
    gone = [cuts[name].scores[cuts[name].kept :] for name in worths]
    least = max((each[0] for each in gone if len(each)), default=0.0)
    ascending = np.sort(np.concatenate(list(worths.values())))
    for name, raw in worths.items():
        # What is raised to one level keeps its order, by a part in a million.
        place = np.searchsorted(ascending, raw, side="right") / max(1, len(ascending))
        cuts[name].scores[: cuts[name].kept] = np.maximum(raw, least) * (1 + 1e-6 * place)
    scores = [cuts[cost.name].scores for cost in selector.costs]
    per_param = [cost.chain("macs", (1,)) / cost.chain("params", (1,)) for cost in selector.costs]
    return replace(
        selector,
        scores=tuple(each.copy() for each in scores),
        params_scores=tuple(each * ratio for each, ratio in zip(scores, per_param, strict=True)),
    )


def drawn_loss(outputs: Any, number: int) -> Tensor:
    """Σ cross-entropy to labels drawn by the network's own softmax, the same in every pass: no label is needed."""
    logits = logits_in(outputs)
    rows = logits.flatten(0, -2).float()
    if not rows.isfinite().all():
        raise InvalidArgumentError(f"data: batch {number + 1} gives NaN or infinity; allowed: finite inputs")
    chances, weights = drawing(rows.detach())
    generator = torch.Generator().manual_seed(number)
    labels = torch.multinomial(chances.cpu(), 1, generator=generator).to(rows.device)
    losses = F.cross_entropy(rows, labels.squeeze(1), reduction="none")
    return (losses * weights.gather(1, labels).squeeze(1)).sum()


def drawing(logits: Tensor) -> tuple[Tensor, Tensor]:
    """With what chance q_c each label is drawn, and what its loss counts then, w_c.

    What is wanted is Σ_c p_c g_c g_cᵀ with g_c = p − e_c, the gradient of the loss of label c. A network that is sure
    of itself would draw its own answer nearly always, whose gradient is nearly nothing, so that a few images would
    decide. Drawn with q_c ∝ p_c ‖g_c‖² and weighted with w_c = √(p_c/q_c), the expectation is the same, and every image
    counts as much as it does in the whole sum.
    """
    p = logits.double().softmax(dim=-1) if logits.device.type != "mps" else logits.softmax(dim=-1)
    squares = p.square().sum(dim=-1, keepdim=True) - 2 * p + 1
    shares = p * squares
    total = shares.sum(dim=-1, keepdim=True)
    is_sure = total <= torch.finfo(p.dtype).tiny  # to the last bit: there is no gradient to weigh
    chances = torch.where(is_sure, p, shares / torch.where(is_sure, 1.0, total))
    weights = (total / squares.clamp_min(torch.finfo(p.dtype).tiny)).sqrt()
    return chances, torch.where(is_sure, 0.0, weights).to(logits.dtype)


@torch.no_grad()
def _write_(layers: Sequence[Layer], ranks: Mapping[str, int], cuts: Mapping[str, _Cut]) -> None:
    """The weights, cut to these ranks."""
    for layer in layers:
        rank, one = ranks[layer.name], cuts[layer.name]
        layer.weight.copy_(to_weight(one.p[:, :rank] @ one.q[:rank], layer.shape, layer.form))


@contextmanager
def _restored(base: nn.Module, layers: Sequence[Layer]) -> Iterator[None]:
    """Afterwards the weights, the statistics and how these are averaged are as before."""
    weights = {layer.weight: layer.weight.detach().clone() for layer in layers}
    norms = [(norm, norm._buffers, norm.momentum, norm.training) for norm in tracked_batch_norms(base).values()]
    for norm, buffers, _, _ in norms:
        norm._buffers = {name: None if each is None else each.clone() for name, each in buffers.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, before in weights.items():
                weight.copy_(before)
        for norm, buffers, momentum, mode in norms:
            norm._buffers, norm.momentum, norm.training = buffers, momentum, mode


def _counter(batches: Iterable[Any], passes_in_all: int, report: Report) -> Callable[[], None]:
    """Called after every batch, tells how far it is, where the loader says how many there are."""
    tracker = Tracker(report, "measuring", total=length_of(batches) * passes_in_all, unit="batches")
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        tracker.update(done)

    return count
