"""Norms of the gradients of the full and of the low-rank network, before they are brought to one (appendix A)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from decomposable.core.gradients import Gradient, norm
from decomposable.core.joint import JointObjective
from decomposable.core.layers import Layer


def gradient_norms(joint: JointObjective, closure: Callable[[nn.Module], Tensor]) -> dict[str, tuple[float, float]]:
    """Return (‖∇_f‖, ‖∇‖) of every layer that a joint objective decomposes, for one batch; no `.grad` changes.

    The low-rank network is the next that the objective would draw.
    """
    full, low = joint.gradients(closure)

    def size(gradient: Gradient, layer: Layer) -> float:
        found = gradient[layer.parameter]
        return 0.0 if found is None else float(norm(layer.cut.of(found)))

    return {layer.name: (size(full, layer), size(low, layer)) for layer in joint.layers}
