"""Batch normalisation as part of the layer before it, in numpy.

BN(Wx + b) = s·(Wx + b − mean) + β = (s·W)x + (s·(b − mean) + β),  s = γ/√(var + ε), one number for every channel
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decomposable.edge.arrays import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Norm:
    """The numbers of a batch normalisation layer, one for every channel."""

    gamma: Array
    beta: Array
    mean: Array
    var: Array
    epsilon: float

    @property
    def scale(self) -> Array:
        """S of the equation, in double precision."""
        scale: Array = self.gamma / np.sqrt(self.var.astype(np.float64) + self.epsilon)
        return scale


def folded(weight: Array, bias: Array | None, norm: Norm) -> tuple[Array, Array]:
    """Weight and bias of the layer that does both; output channels lie along the weight's first axis.

    >>> norm = Norm(gamma=np.ones(1), beta=np.ones(1), mean=np.full(1, 2.0), var=np.full(1, 0.25), epsilon=0.0)
    >>> weight, bias = folded(np.array([[3.0]]), None, norm)  # 3x → (3x − 2) / 0.5 + 1
    >>> weight.tolist(), bias.tolist()
    ([[6.0]], [-3.0])
    """
    with np.errstate(all="ignore"):  # what is no number stays none, as in the network itself
        scale = norm.scale
        shift = norm.beta - norm.mean * scale
        if bias is not None:
            shift = shift + bias * scale
        along_outputs = scale.astype(weight.dtype).reshape(-1, *(1,) * (weight.ndim - 1))
        return np.ascontiguousarray(weight * along_outputs), shift.astype(weight.dtype)
