"""What a cut must not change: the answers of a network, or the values that it gives.

A goal has two sides. Its *loss* is led back through the network: the second moment of the gradients that reach a layer
says how much each direction of the layer's output matters (`core/moments.py`). Its *distance* compares a cut network
with the full one, image by image (`judging.py`).

    LOSS     answers: KL(full ‖ cut) of the softmax     the cross-entropy to labels that the network itself draws
    OUTPUT   values: ‖cut − full‖², relative to full    a random projection of the outputs, whose moment is JᵀJ

Neither needs a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decomposable.core.distillation import logits_of
from decomposable.core.moments import Loss
from decomposable.network.calibration.batches import tensors_in
from decomposable_edge.errors import InvalidArgumentError

BY_DATA = ("loss", "output")
"""Criteria that need data."""

LOOKED_AT = 8
"""Batches whose outputs decide which goal fits a network."""

Readings = tuple[Tensor, ...]
"""The tensors that a goal reads in the outputs of a batch."""


@dataclass(frozen=True)
class Goal:
    """One of the two; `distances` gives a number for every row of the readings."""

    name: str
    unit: str
    read: Callable[[Any], Readings]
    loss: Loss
    distances: Callable[[Readings, Readings], Tensor]


def goal_of(criterion: str | None, outputs: Iterable[Any]) -> Goal:
    """Return the goal that fits the outputs of some batches: LOSS if it fits one of them.

    Logits may be positive in one batch by chance. Features behind a ReLU are positive in all.
    """
    return LOSS if LOSS in [goal_for(criterion, each) for each in outputs] else OUTPUT


def goal_for(criterion: str | None, outputs: Any) -> Goal:
    """Return the goal that was asked for; without a criterion, the one that fits these outputs.

    A plain matrix may hold logits or features. It holds features if its rows have length 1, as embeddings have, or if
    no number is negative, as behind a ReLU. Probabilities are as good as logits.
    """
    if criterion is not None:
        return {"loss": LOSS, "output": OUTPUT}[criterion]
    try:
        found = logits_of(outputs)
    except InvalidArgumentError:
        return OUTPUT
    if found is not outputs or _are_probabilities(found):
        return LOSS
    rows = found.detach().float()
    has_length_one = bool(((rows.norm(dim=-1) - 1).abs() < 1e-3).all())
    return OUTPUT if has_length_one or bool((rows >= 0).all()) else LOSS


def logits_in(outputs: Any) -> Tensor:
    """Return the logits in what a network gives, a row for each position; of probabilities the logarithms."""
    try:
        found = logits_of(outputs).flatten(0, -2)
    except InvalidArgumentError:
        came = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        allowed = "a matrix of logits, an output that has logits, or criterion='output'"
        why = f"'loss', but the network gives {came}"
        raise InvalidArgumentError.about("criterion", came, allowed, why=why) from None
    return found.clamp_min(torch.finfo(found.dtype).tiny).log() if _are_probabilities(found) else found


def _are_probabilities(found: Tensor) -> bool:
    rows = found.detach().float()
    return bool((rows >= 0).all()) and bool(((rows.sum(dim=-1) - 1).abs() < 1e-3).all())


def drawn_loss(outputs: Any, number: int) -> Tensor:
    """Return Σ cross-entropy to labels that the network's own softmax draws, the same labels in every pass."""
    rows = logits_in(outputs).float()
    _require_finite([rows], number)
    chances, weights = drawing(rows.detach())
    generator = torch.Generator().manual_seed(number)
    labels = torch.multinomial(chances.cpu(), 1, generator=generator).to(rows.device)
    losses = F.cross_entropy(rows, labels.squeeze(1), reduction="none")
    return (losses * weights.gather(1, labels).squeeze(1)).sum()


def drawing(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chance q_c with which each label is drawn, and the weight w_c of its loss.

    The aim is Σ_c p_c g_c g_cᵀ with g_c = p − e_c, the gradient of the loss of label c. A network that is nearly
    certain would draw its own answer nearly always, with a gradient of nearly zero, and a few images would decide. So
    a label is drawn with q_c ∝ p_c ‖g_c‖² and weighted with w_c = √(p_c/q_c). The expectation is the same, and every
    image counts as much as it does in the whole sum.
    """
    p = logits.double().softmax(dim=-1) if logits.device.type != "mps" else logits.softmax(dim=-1)
    squares = p.square().sum(dim=-1, keepdim=True) - 2 * p + 1
    shares = p * squares
    total = shares.sum(dim=-1, keepdim=True)
    is_sure = total <= torch.finfo(p.dtype).tiny  # certain to the last bit: no gradient to weigh
    chances = torch.where(is_sure, p, shares / torch.where(is_sure, 1.0, total))
    weights = (total / squares.clamp_min(torch.finfo(p.dtype).tiny)).sqrt()
    return chances, torch.where(is_sure, 0.0, weights).to(logits.dtype)


def is_certain(logits: Tensor) -> bool:
    """Return whether the gradient of every row's loss is too small to be squared in float32."""
    return float(drawing(logits.float())[1].double().max()) ** 2 < torch.finfo(torch.float32).tiny


def divergences(low: Readings, full: Readings) -> Tensor:
    """Return KL(full ‖ low) of every row.

    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> divergences((logits,), (logits,)).tolist()
    [0.0, 0.0]
    """
    low_log, full_log = (each[0].float().log_softmax(dim=-1) for each in (low, full))
    p = full_log.exp()
    # A class that the full network calls impossible (a logit of −∞) adds nothing; 0 · ∞ would be NaN.
    low_log, full_log = (each.masked_fill(p == 0, 0.0) for each in (low_log, full_log))
    return (p * (full_log - low_log)).sum(dim=-1)


def values_in(outputs: Any) -> Readings:
    """Return all tensors of real numbers in what a network gives, a row for each sample."""
    tensors = (t for t in tensors_in(outputs) if t.is_floating_point() and t.dim() > 0)
    found = tuple(t.flatten(1) if t.dim() > 1 else t[:, None] for t in tensors)
    if not found:
        came, allowed = type(outputs).__name__, "one, or several in a tuple, a list or a mapping"
        why = f"'output', but the network gives a {came} without a tensor of numbers"
        raise InvalidArgumentError.about("criterion", came, allowed, why=why)
    return found


def projected_loss(outputs: Any, number: int) -> Tensor:
    """Return Σ ε · f over a batch, with random signs ε, the same in every pass.

    The gradient of one image is Jᵀε, and its second moment JᵀJ, that of ‖f(x) − f̃(x)‖². Each of several outputs counts
    relative to its own mean square.
    """
    values = values_in(outputs)
    _require_finite(values, number)
    generator = torch.Generator().manual_seed(number)
    total = values[0].new_zeros((), dtype=torch.float32)
    for each in values:
        signs = (torch.randint(0, 2, each.shape, generator=generator) * 2 - 1).to(each.device)
        total = total + (each.float() * signs).sum() / _root_mean_square(each)
    return total


def squared_distances(low: Readings, full: Readings) -> Tensor:
    """Return ‖low − full‖² of every row, relative to the mean of ‖full‖²; the mean over several outputs."""
    found = [
        ((a.float() - b.float()) / _root_mean_square(b)).square().mean(dim=-1) for a, b in zip(low, full, strict=True)
    ]
    rows = max(map(len, found))  # an output with another number of rows counts as a whole
    return torch.stack([each if len(each) == rows else each.mean().expand(rows) for each in found]).mean(dim=0)


def _root_mean_square(values: Tensor) -> float:
    return max(float(values.detach().float().square().mean().sqrt()), 1e-12)


def _require_finite(values: Sequence[Tensor], number: int) -> None:
    if not all(bool(each.isfinite().all()) for each in values):
        why = f"batch {number + 1} gives NaN or infinity"
        raise InvalidArgumentError.about("data", number + 1, "finite inputs", why=why)


def _read_logits(outputs: Any) -> Readings:
    return (logits_in(outputs).detach(),)


def _read_values(outputs: Any) -> Readings:
    return tuple(each.detach() for each in values_in(outputs))


LOSS = Goal("loss", "KL divergence", _read_logits, drawn_loss, divergences)
OUTPUT = Goal("output", "relative squared distance", _read_values, projected_loss, squared_distances)
