"""Spatial form of two-dimensional kernels: a horizontal convolution to R bases, then a vertical one to the outputs."""

from __future__ import annotations

from collections.abc import Sequence

from decomposable.core.forms.matrix import MatrixForm
from decomposable_edge.sizing.chain import Axes


class Spatial(MatrixForm):
    """(I·W) × (O·H)."""

    name, short = "spatial", "sp"

    def takes(self, shape: Sequence[int]) -> bool:
        """A kernel of two axes that is not 1×1: others have nothing spatial to split in two."""
        return len(shape) == 4 and max(shape[2:]) > 1

    def stages(self, axes: int) -> tuple[Axes, ...]:
        """Along x, then along y."""
        return (False, True), (True, False)
