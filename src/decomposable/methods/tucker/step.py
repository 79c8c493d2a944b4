"""Fine-tuning is normal learning of the decomposed network."""

from decomposable.methods.plain.step import PlainStep

__all__ = ["PlainStep"]
