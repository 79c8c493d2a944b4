"""PyTorch Lightning: `JointModule` (extra "lightning")."""

from __future__ import annotations

from decomposable_edge.errors import MissingExtraError

try:
    import lightning.pytorch as _lightning  # noqa: F401
except ImportError as error:
    raise MissingExtraError.of("lightning", "lightning") from error

from decomposable.lightning.module import JointModule

__all__ = ["JointModule"]
