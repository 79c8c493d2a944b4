"""Which function built a model, noted on it in plain JSON: a file that says so is loaded without the model's code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Integral, Number
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from decomposable.core.tree import FORWARD_HOOKS
from decomposable_edge.errors import InvalidArgumentError

Arguments = ParamSpec("Arguments")
Model = TypeVar("Model", bound=nn.Module)

BUILDERS: dict[str, Callable[..., nn.Module]] = {}
"""What a file may name. Nothing else is ever called because a file says so."""

_NOTE = "_built_by"
_MOST = {"num_classes": 1 << 20, "in_channels": 1 << 12, "widths": 1 << 14, "context": 1 << 17}
_MOST |= {"width": 1 << 14, "depth": 1 << 8, "heads": 1 << 8, "patch": 1 << 10, "image": 1 << 12}
_MOST_WIDTHS = 64


def builder(build: Callable[Arguments, Model]) -> Callable[Arguments, Model]:
    """Note the name and the arguments of this function on the models that it builds, and let files name it."""
    signature = inspect.signature(build)

    @wraps(build)
    def noting(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Model:
        model = build(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        plain = {k: int(v) if isinstance(v, Integral) else list(map(int, v)) for k, v in bound.arguments.items()}
        model.__dict__[_NOTE] = {"name": build.__name__, "arguments": plain}
        return model

    BUILDERS[build.__name__] = noting
    return noting


def built_by(model: nn.Module) -> dict[str, Any] | None:
    """Return the note on a model, or None. It does not say what was done to the model since."""
    note = vars(model).get(_NOTE)
    return {**note, "arguments": dict(note["arguments"])} if isinstance(note, dict) else None


def rebuilt(note: Mapping[str, Any]) -> nn.Module:
    """Build the model that a note describes, on the meta device: it takes no memory, whatever the note claims.

    >>> from decomposable import models
    >>> rebuilt({"name": "small_cnn", "arguments": {"widths": [8, 16]}})[0].weight.shape
    torch.Size([8, 1, 3, 3])
    """
    name, arguments = note["name"], note["arguments"]
    if name not in BUILDERS:
        raise InvalidArgumentError.about("built_by", name, ", ".join(BUILDERS))
    parameters = inspect.signature(BUILDERS[name]).parameters
    for option, value in arguments.items():
        if option not in parameters:
            raise InvalidArgumentError(f"{name} has no argument {option!r:.60}; allowed: {', '.join(parameters)}")
        is_list = isinstance(value, list) and 1 <= len(value) <= _MOST_WIDTHS
        each = value if is_list else [value]
        if is_list != (option == "widths") or not all(type(one) is int and 1 <= one <= _MOST[option] for one in each):
            kind = "a list of ints" if option == "widths" else "an int"
            raise InvalidArgumentError(f"{name}: {option}={value!r:.60}; allowed: {kind} from 1 to {_MOST[option]:,}")
    with torch.device("meta"):
        return BUILDERS[name](**arguments)


def noted(model: nn.Module) -> dict[str, Any] | None:
    """Return the note on a model for a file; ``is_changed`` says that the model is not what its builder made.

    >>> from decomposable.models import small_cnn
    >>> model = small_cnn()
    >>> model[2] = nn.Tanh()
    >>> noted(small_cnn())["is_changed"], noted(model)["is_changed"], noted(nn.Tanh())
    (False, True, None)
    """
    note = built_by(model)
    if note is None:
        return None
    try:
        built = rebuilt(note)
    except InvalidArgumentError:  # larger than what is taken from a file
        return None
    # An activation that was replaced is in the repr only.
    pairs = zip(built.named_modules(), model.named_modules(), strict=False)
    is_alike = repr(built) == repr(model) and all(a[0] == b[0] and _does_the_same(a[1], b[1]) for a, b in pairs)
    return {**note, "is_changed": not is_alike}


def _does_the_same(built: nn.Module, module: nn.Module) -> bool:
    """Return whether a module has the very same class, and nothing about it is changed that its repr does not show."""
    if type(built) is not type(module) or is_patched(module):
        return False
    before, now = ({k: v for k, v in vars(m).items() if isinstance(v, Number | str)} for m in (built, module))
    return all(now.get(name) == value for name, value in before.items() if name != "training")


def is_patched(module: nn.Module) -> bool:
    """Return whether a module does something else than its class says: it has hooks, or a method of its own.

    >>> module = nn.ReLU()
    >>> module.forward = lambda x: x
    >>> is_patched(module), is_patched(nn.ReLU())
    (True, False)
    """
    has_hooks = any(getattr(module, hooks) for hooks in FORWARD_HOOKS)
    return has_hooks or any(callable(getattr(type(module), name, None)) for name in vars(module))
