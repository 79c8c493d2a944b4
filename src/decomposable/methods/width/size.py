"""How all methods with widths call a size."""

from __future__ import annotations

from decomposable.methods.widths import Widths
from decomposable.network.sized import Size


def size_at(widths: Widths, width: float) -> Size:
    """The size of a network at some width; its name tells widths apart that differ by 1 / 1024."""
    (macs, params), (full_macs, full_params) = widths.cost(width), widths.cost(1.0)
    return Size(
        name=f"width {width:.4g}",
        value=width,
        macs=macs,
        params=params,
        full_macs=full_macs,
        full_params=full_params,
    )
