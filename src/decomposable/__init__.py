"""Train a neural network once, then run it at any size. See README.md for the idea, `core/joint.py` for its heart."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from decomposable.moved import keep_old_paths

__version__ = "0.1.0.dev0"

# Loaded on first use: a device without torch imports `decomposable.edge`, and a command answers --help at once.
_HOME = {
    "ArtifactError": "errors",
    "DecomposableError": "errors",
    "DecomposedNet": "network.decomposed",
    "JointObjective": "core.joint",
    "Losses": "core.joint",
    "RankPlan": "sizing.plans",
    "Settings": "methods.settings",
    "Task": "recipes",
    "Taylor": "core.factors",
    "SizedNet": "network.sized",
    "analysis": "analysis",
    "compare": "comparison",
    "decompose": "network.decompose",
    "export_any_size": "export.any_size",
    "export_onnx": "export.one_size",
    "export_torch": "export.one_size",
    "load": "methods.loading",
    "models": "models",
    "recipes": "recipes",
    "train": "training.experiment",
}

if TYPE_CHECKING:
    from decomposable import analysis as analysis
    from decomposable import models as models
    from decomposable import recipes as recipes
    from decomposable.comparison import compare as compare
    from decomposable.core.factors import Taylor as Taylor
    from decomposable.core.joint import JointObjective as JointObjective
    from decomposable.core.joint import Losses as Losses
    from decomposable.errors import ArtifactError as ArtifactError
    from decomposable.errors import DecomposableError as DecomposableError
    from decomposable.export.any_size import export_any_size as export_any_size
    from decomposable.export.one_size import export_onnx as export_onnx
    from decomposable.export.one_size import export_torch as export_torch
    from decomposable.methods.loading import load as load
    from decomposable.methods.settings import Settings as Settings
    from decomposable.network.decompose import decompose as decompose
    from decomposable.network.decomposed import DecomposedNet as DecomposedNet
    from decomposable.network.sized import SizedNet as SizedNet
    from decomposable.recipes import Task as Task
    from decomposable.sizing.plans import RankPlan as RankPlan
    from decomposable.training.experiment import train as train

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'decomposable' has no attribute {name!r}")
    module = import_module(f"decomposable.{_HOME[name]}")
    return module if name == _HOME[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


keep_old_paths()
