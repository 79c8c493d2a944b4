"""Ready trainings. A recipe is a function from a data folder and settings to a `Task`: a model and data.

    def flowers(data: Path | None, settings: Settings = Settings(epochs=30)) -> Task:
        return Task(build_model=lambda: MyNet(classes=5), load_data=lambda: FromDatasets(...))

The default of `settings` is what the recipe runs with; `--set key=value` replaces single values. A recipe of your own
is used in place of a built-in name as `package.module:function`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from decomposable.data.base import Batch, Data
from decomposable.recipes.settings import Settings
from decomposable_edge.errors import InvalidArgumentError

__all__ = [
    "BUILT_IN",
    "Recipe",
    "Settings",
    "Task",
    "cross_entropy",
    "default_settings",
    "find",
    "imported",
    "make_task",
    "needs_data",
    "resolved",
]

Recipe = Callable[..., "Task"]

BUILT_IN = {
    "digits": "decomposable.recipes.small:digits",
    "fashion-mnist": "decomposable.recipes.small:fashion",
    "cifar10-resnet20": "decomposable.recipes.small:cifar10_resnet20",
    "cifar10-resnet56": "decomposable.recipes.small:cifar10_resnet56",
    "cifar10-vit": "decomposable.recipes.transformers:cifar10_vit",
    "python-text-lm": "decomposable.recipes.transformers:python_text_lm",
    "cifar10-vgg15": "decomposable.recipes.paper:cifar10_vgg15",
    "cifar100-resnet34": "decomposable.recipes.paper:cifar100_resnet34",
    "imagenet-resnet50": "decomposable.recipes.paper:imagenet_resnet50",
}


def cross_entropy(net: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a classifier."""
    x, y = batch
    return F.cross_entropy(net(x), y)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on what. Both are made when they are needed: choosing a size needs the model and no data."""

    build_model: Callable[[], nn.Module]
    load_data: Callable[[], Data]
    loss: Callable[[nn.Module, Batch], Tensor] = cross_entropy


def find(name: str) -> Recipe:
    """Return a built-in recipe by its name, or any function as ``package.module:function``."""
    if name in BUILT_IN:
        return imported(BUILT_IN[name])
    if ":" in name:
        return imported(name)
    near = difflib.get_close_matches(name.lower().replace("_", "-"), BUILT_IN, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InvalidArgumentError(
        f"unknown recipe {name}; {hint}allowed: {', '.join(BUILT_IN)}, or your own as package.module:function"
    )


def resolved(recipe: str | Recipe) -> tuple[Recipe, str]:
    """Return the function of a recipe, given by name or as a function, and the name for its records."""
    if isinstance(recipe, str):
        return find(recipe), recipe
    return recipe, f"{recipe.__module__}:{recipe.__qualname__}"


def imported(address: str, option: str = "recipe") -> Recipe:
    """Return the function of a ``package.module:function``; messages call it `option`."""
    module_name, _, function_name = address.partition(":")
    if not module_name or not function_name or module_name.endswith(".py"):
        example = f"{module_name.removesuffix('.py') or 'package.module'}:{function_name or 'function'}"
        raise InvalidArgumentError(f"{option} {address}: not a module and a function; allowed: as in {example}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the folder one is in, as `python -m` has it
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # code of somebody else
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
        raise InvalidArgumentError(f"{option} {address}: {module_name} cannot be imported ({reason})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InvalidArgumentError(f"{option} {address}: {module_name} has no function called {function_name}")
    return function


def default_settings(recipe: Recipe) -> Settings:
    """Return the settings that a recipe has by default."""
    default = getattr(_parameters(recipe).get("settings"), "default", None)
    return default if isinstance(default, Settings) else Settings()


def make_task(recipe: Recipe, data: Path | None, settings: Settings) -> Task:
    """Call the recipe with those of the two arguments that it takes."""
    arguments = {"data": data, "settings": settings}
    parameters = _parameters(recipe)
    for name, parameter in parameters.items():
        if name not in arguments and parameter.default is parameter.empty and parameter.kind < parameter.VAR_KEYWORD:
            raise InvalidArgumentError(f"recipe: it takes an argument {name}; allowed: data, settings")
    if data is not None and "data" not in parameters:
        raise InvalidArgumentError(f"--data {data}: this recipe brings its own data; allowed: no --data")
    task = recipe(**{name: value for name, value in arguments.items() if name in parameters})
    if not isinstance(task, Task):
        raise InvalidArgumentError(f"recipe: it returned {type(task).__name__}; allowed: a decomposable.recipes.Task")
    return task


def needs_data(recipe: Recipe) -> bool:
    """Return whether a recipe takes a folder of data."""
    return "data" in _parameters(recipe)


def _parameters(recipe: Recipe) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(recipe).parameters
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"recipe: {recipe!r:.60} is not a Python function; allowed: one") from error
