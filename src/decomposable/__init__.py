"""Train a neural network once, then run it at any size. See README.md for the idea, `core/joint.py` for its heart."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from decomposable_edge import __version__ as __version__

# Loaded on first use, so that a command answers --help at once.
_HOME = {
    "DecomposableError": "decomposable_edge.errors",
    "DecomposedNet": "decomposable.network.decomposed",
    "Elastic": "decomposable.elastic",
    "JointObjective": "decomposable.core.joint",
    "RankPlan": "decomposable_edge.sizing.plans",
    "decompose": "decomposable.network.decompose",
    "export_onnx": "decomposable.export.one_size",
    "export_torch": "decomposable.export.one_size",
    "load": "decomposable.network.loading",
    "models": "decomposable.models",
    "recipes": "decomposable.recipes",
    "train": "decomposable.training.experiment",
}

if TYPE_CHECKING:
    from decomposable import models as models
    from decomposable import recipes as recipes
    from decomposable.core.joint import JointObjective as JointObjective
    from decomposable.elastic import Elastic as Elastic
    from decomposable.export.one_size import export_onnx as export_onnx
    from decomposable.export.one_size import export_torch as export_torch
    from decomposable.network.decompose import decompose as decompose
    from decomposable.network.decomposed import DecomposedNet as DecomposedNet
    from decomposable.network.loading import load as load
    from decomposable.training.experiment import train as train
    from decomposable_edge.errors import DecomposableError as DecomposableError
    from decomposable_edge.sizing.plans import RankPlan as RankPlan

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'decomposable' has no attribute {name!r}")
    module = import_module(_HOME[name])
    return module if module.__name__ == f"decomposable.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
