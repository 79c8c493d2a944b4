"""Norms of the gradients of the full and of the low-rank network, before they are brought to one (appendix A)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from decomposable.core.gradients import norm
from decomposable.core.joint import JointObjective


def gradient_norms(joint: JointObjective, closure: Callable[[nn.Module], Tensor]) -> dict[str, tuple[float, float]]:
    """(‖∇_f‖, ‖∇‖) of every layer that a joint objective decomposes, for one batch; no `.grad` changes.

    The low-rank network is the next that the objective would draw.
    """
    full, low = joint.gradients(closure)

    def size(gradient: Any) -> float:
        return 0.0 if gradient is None else float(norm(gradient))

    return {layer.name: (size(full[layer.weight]), size(low[layer.weight])) for layer in joint.layers}
