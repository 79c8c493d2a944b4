"""What a cut must not lose: the answers of a network, or the values that it gives.

A goal has two sides. Its *loss* is led back through the network, and the second moment of the gradients that reach a
layer says how strongly the goal feels each direction of the layer's output (`core/moments.py`). Its *distance* compares
a cut network with the full one, image by image (`judging.py`).

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
"""Criteria that need data: what is lost of the network's answers, or of its outputs."""

Readings = tuple[Tensor, ...]
"""What a goal looks at in the outputs of a batch."""


@dataclass(frozen=True)
class Goal:
    """One of the two; `distances` has a number for every row of the readings."""

    name: str
    unit: str
    read: Callable[[Any], Readings]
    loss: Loss
    distances: Callable[[Readings, Readings], Tensor]


LOOKED_AT = 8
"""Batches whose outputs say what a network gives."""


def goal_of(criterion: str | None, outputs: Iterable[Any]) -> Goal:
    """The goal for what a network gives for some batches: logits may be positive in one of them by chance, and features
    are so in all.
    """
    found = [goal_for(criterion, each) for each in outputs]
    return LOSS if LOSS in found else OUTPUT


def goal_for(criterion: str | None, outputs: Any) -> Goal:
    """The goal that was asked for; without one, that which fits what the network gives.

    A plain matrix may be logits or features. Rows of length 1, as those of embeddings, and numbers of which none is
    negative, as behind a ReLU, are no logits; probabilities are as good as these.
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
    """The logits in what a network returns, a row for each position; what has none is refused, in the name of the
    criterion that needs them. The logarithms of probabilities are logits.
    """
    try:
        found = logits_of(outputs).flatten(0, -2)
    except InvalidArgumentError:
        came = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise InvalidArgumentError(
            f"criterion='loss': the network gives {came}; allowed: a matrix of logits, an output that has logits, or "
            "criterion='output'"
        ) from None
    return found.clamp_min(torch.finfo(found.dtype).tiny).log() if _are_probabilities(found) else found


def _are_probabilities(found: Tensor) -> bool:
    rows = found.detach().float()
    return bool((rows >= 0).all()) and bool(((rows.sum(dim=-1) - 1).abs() < 1e-3).all())


def drawn_loss(outputs: Any, number: int) -> Tensor:
    """Σ cross-entropy to labels drawn by the network's own softmax, the same in every pass: no label is needed."""
    rows = logits_in(outputs).float()
    _require_finite([rows], number)
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


def is_certain(logits: Tensor) -> bool:
    """Whether the loss of none of these rows has a gradient whose square float32 has digits for."""
    return float(drawing(logits.float())[1].double().max()) ** 2 < torch.finfo(torch.float32).tiny


def divergences(low: Readings, full: Readings) -> Tensor:
    """KL(full ‖ low) of every row.

    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> divergences((logits,), (logits,)).tolist()
    [0.0, 0.0]
    """
    low_log, full_log = (each[0].float().log_softmax(dim=-1) for each in (low, full))
    p = full_log.exp()
    # A class that the full network holds impossible (a logit of −∞) adds nothing, and 0 · ∞ would be NaN.
    low_log, full_log = (each.masked_fill(p == 0, 0.0) for each in (low_log, full_log))
    return (p * (full_log - low_log)).sum(dim=-1)


def values_in(outputs: Any) -> Readings:
    """All tensors of numbers in what a network returns, a row for each sample."""
    found = tuple(t.flatten(1) if t.dim() > 1 else t[:, None] for t in tensors_in(outputs) if _is_read(t))
    if not found:
        raise InvalidArgumentError(
            f"criterion='output': the network gives a {type(outputs).__name__} without a tensor of numbers; allowed: "
            "one, or several in a tuple, a list or a mapping"
        )
    return found


def _is_read(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 0


def projected_loss(outputs: Any, number: int) -> Tensor:
    """Σ ε · f over a batch, with signs ε that are drawn, the same in every pass.

    The gradient of one image is Jᵀε, and its second moment JᵀJ: that of ‖f(x) − f̃(x)‖². Each of several outputs counts
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
    """‖low − full‖² of every row, relative to the mean of ‖full‖²; the mean over several outputs."""
    found = [
        ((a.float() - b.float()) / _root_mean_square(b)).square().mean(dim=-1) for a, b in zip(low, full, strict=True)
    ]
    rows = max(map(len, found))  # an output of another number of rows counts as a whole
    return torch.stack([each if len(each) == rows else each.mean().expand(rows) for each in found]).mean(dim=0)


def _root_mean_square(values: Tensor) -> float:
    return max(float(values.detach().float().square().mean().sqrt()), 1e-12)


def _require_finite(values: Sequence[Tensor], number: int) -> None:
    if not all(bool(each.isfinite().all()) for each in values):
        raise InvalidArgumentError(f"data: batch {number + 1} gives NaN or infinity; allowed: finite inputs")


LOSS = Goal("loss", "KL divergence", lambda outputs: (logits_in(outputs).detach(),), drawn_loss, divergences)
OUTPUT = Goal(
    "output",
    "relative squared distance",
    lambda outputs: tuple(each.detach() for each in values_in(outputs)),
    projected_loss,
    squared_distances,
)
