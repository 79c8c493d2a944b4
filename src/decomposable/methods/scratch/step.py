"""One pass, one gradient: two factors are trained as any two layers are."""

from __future__ import annotations

from decomposable.methods.plain.step import PlainStep

__all__ = ["PlainStep"]
