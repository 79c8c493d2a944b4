"""Pointwise form, the channel form of a transposed convolution: 1×1 to R bases, then the whole kernel to the outputs.

A transposed convolution multiplies every position of its input with all of its kernel, and its output has more
positions than its input. So the 1×1 layer is cheapest before it: there are (I + O·kernel) multiplications per basis and
position of the input; with the kernel first there would be I·kernel + O·(positions of the output per input's).
"""

from __future__ import annotations

from collections.abc import Sequence

from decomposable.core.forms.matrix import MatrixForm
from decomposable_edge.sizing.chain import Axes


class Pointwise(MatrixForm):
    """I × (O·kernel)."""

    name, short = "pointwise", "pw"

    def takes(self, shape: Sequence[int]) -> bool:
        """All do."""
        return True

    def stages(self, axes: int) -> tuple[Axes, ...]:
        """Nothing, then the kernel."""
        return (False,) * axes, (True,) * axes
