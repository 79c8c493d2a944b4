"""Channel form: a layer with the whole kernel to R bases, then 1×1 (or a linear layer) from these to the outputs."""

from __future__ import annotations

from collections.abc import Sequence

from decomposable.core.forms.matrix import MatrixForm
from decomposable_edge.sizing.chain import Axes


class Channel(MatrixForm):
    """(I·kernel) × O. Every weight can have it."""

    name, short = "channel", "ch"

    def takes(self, shape: Sequence[int]) -> bool:
        """All do."""
        return True

    def stages(self, axes: int) -> tuple[Axes, ...]:
        """The kernel, then nothing."""
        return (True,) * axes, (False,) * axes
