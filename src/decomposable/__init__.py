"""Train a neural network once, then run it at any size. See README.md for the idea, `joint.py` for its heart."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

# Loaded on first use: a device without torch imports `decomposable.edge`, and a command answers --help at once.
_HOME = {
    "DecomposableError": "errors",
    "DecomposedNet": "network",
    "JointObjective": "joint",
    "Losses": "joint",
    "RankPlan": "ranks",
    "Taylor": "taylor",
    "decompose": "network",
    "models": "models",
}

if TYPE_CHECKING:
    from decomposable import models
    from decomposable.errors import DecomposableError
    from decomposable.joint import JointObjective, Losses
    from decomposable.network import DecomposedNet, decompose
    from decomposable.ranks import RankPlan
    from decomposable.taylor import Taylor

__all__ = [
    "DecomposableError",
    "DecomposedNet",
    "JointObjective",
    "Losses",
    "RankPlan",
    "Taylor",
    "decompose",
    "models",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'decomposable' has no attribute {name!r}")
    module = import_module(f"decomposable.{_HOME[name]}")
    return module if name == _HOME[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
