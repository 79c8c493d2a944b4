"""Hugging Face Transformers: `JointTrainer`, and one size of a network as a folder with a model card (extra "hf")."""

from __future__ import annotations

from decomposable_edge.errors import MissingExtraError

try:
    import accelerate as _accelerate  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise MissingExtraError.of("transformers", "hf") from error

from decomposable.hf.pretrained import from_pretrained, save_pretrained
from decomposable.hf.trainer import JointTrainer

__all__ = ["JointTrainer", "from_pretrained", "save_pretrained"]
