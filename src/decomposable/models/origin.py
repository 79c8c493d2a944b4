"""Which function built a model, noted on it: a file that says so can be loaded without the model's code.

The note is plain JSON, so that a model is stored and copied as ever: ``{"name": "resnet20", "arguments": {...}}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeVar

from torch import nn

from decomposable.core.tree import _HOOKS

_NOTE = "_built_by"

Model = TypeVar("Model", bound=nn.Module)


def noting(name: str, model: Model, **arguments: int | Sequence[int]) -> Model:
    """The model, with the name and the arguments of its builder noted on it.

    >>> built_by(noting("resnet20", nn.Sequential(), num_classes=10))
    {'name': 'resnet20', 'arguments': {'num_classes': 10}}
    """
    plain = {k: int(v) if isinstance(v, Integral) else [int(each) for each in v] for k, v in arguments.items()}  # type: ignore[union-attr]
    model.__dict__[_NOTE] = {"name": name, "arguments": plain}
    return model


def built_by(model: nn.Module) -> dict[str, Any] | None:
    """The note on a model, or None. What was done to the model since is not in it."""
    note = vars(model).get(_NOTE)
    return {"name": note["name"], "arguments": dict(note["arguments"])} if isinstance(note, dict) else None


def is_patched(module: nn.Module) -> bool:
    """Whether a module does something else than its class says: it has hooks, or a method of its own.

    >>> module = nn.ReLU()
    >>> module.forward = lambda x: x
    >>> is_patched(module), is_patched(nn.ReLU())
    (True, False)
    """
    has_hooks = any(getattr(module, hooks) for hooks in _HOOKS)
    return has_hooks or any(callable(getattr(type(module), name, None)) for name in vars(module))
