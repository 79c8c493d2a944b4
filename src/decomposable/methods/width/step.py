"""One pass, one gradient: a narrow network is trained as any other."""

from __future__ import annotations

from decomposable.methods.plain.step import PlainStep as WidthStep

__all__ = ["WidthStep"]
