"""The full network as the teacher of the low-rank one: how far the outputs of the two are apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from decomposable.core.passes import LossSpec
from decomposable_edge.errors import InvalidArgumentError

Distance = Callable[[Any, Any], Tensor]
"""``distance(low, full)``: a loss that is small where the low-rank network's outputs are like the full one's."""


@dataclass(frozen=True)
class Distillation:
    """(1 − d) · loss + d · distance(low, full): what the low-rank network learns from, with a share d."""

    share: float
    distance: Distance

    @classmethod
    def of(cls, share: float, distance: Distance | None) -> Distillation:
        """Return it by a distance, None for the KL divergence."""
        if distance is not None and not callable(distance):
            raise InvalidArgumentError(f"distance={distance!r:.80}; allowed: a function of (low, full)")
        if distance is not None and share == 0:
            raise InvalidArgumentError("distance: nothing is distilled; allowed: with distill= above 0")
        return cls(share, distance or kl_divergence)

    def taught(self, call: LossSpec, full: Any) -> LossSpec:
        """Return the call of a low-rank network that learns from these outputs of the full one."""

        def loss(low: Any) -> Tensor:
            distance: object = self.distance(low, full)  # a function of the user's
            if not isinstance(distance, Tensor):
                came = type(distance).__name__
                raise InvalidArgumentError(f"distance: it returned {came}; allowed: a loss, one scalar tensor")
            return distance if self.share == 1 else (1 - self.share) * call.loss(low) + self.share * distance

        return call._replace(loss=loss, name="distance")


def kl_divergence(low: Any, full: Any) -> Tensor:
    """KL(full ‖ low) of the softmax over the last axis, the mean over all rows.

    For matrices of logits, and for outputs that have `logits`, as those of Hugging Face's models do.

    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> float(kl_divergence(logits, logits)), float(kl_divergence(logits, logits.flip(0))) > 0.1
    (0.0, True)
    """
    low_log, full_log = (_log_softmax(logits_of(outputs)).flatten(0, -2) for outputs in (low, full))
    full = full_log.exp()
    # A class that the teacher holds impossible (a logit of −∞) adds nothing, and 0 · ∞ would be NaN.
    low_log, full_log = (each.masked_fill(full == 0, 0.0) for each in (low_log, full_log))
    return (full * (full_log - low_log)).sum() / len(full)


def _log_softmax(logits: Tensor) -> Tensor:
    """Return the logarithm of the softmax, in float32 or better."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def logits_of(outputs: Any) -> Tensor:
    """Return the logits in what a network returns; refuse outputs without logits."""
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    axes = (2,) if found is outputs else (2, 3)  # a plain tensor of more axes may be anything
    if isinstance(found, Tensor) and found.is_floating_point() and found.dim() in axes and found.shape[-1] > 1:
        return found
    came = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(outputs).__name__
    allowed = "a matrix of logits of two or more classes, an output that has logits, or distance=fn(low, full)"
    raise InvalidArgumentError.about("distill", came, allowed, why=f"the network gives {came}")


def detached(outputs: Any) -> Any:
    """Return a network's outputs without their graph; objects that hold tensors are copied."""
    return tree_map(_detached, outputs)


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach()
    held = getattr(leaf, "__dict__", {})
    if not any(isinstance(value, Tensor) for value in held.values()):
        return leaf
    twin = copy.copy(leaf)
    twin.__dict__.update({name: _detached(value) for name, value in held.items()})
    return twin
