"""Settings by flat names, as the command line, Python's keywords and records have them.

The shared settings and those of every registered method are one list there: ``epochs=3 elastic_start=0.3``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from decomposable.recipes.settings import Settings
from decomposable.recipes.values import MethodSettings, Text
from decomposable.training.methods.registry import METHODS, find, kinds
from decomposable_edge.errors import InvalidArgumentError

AnySettings = TypeVar("AnySettings", bound=Settings)
_NESTED = "of_methods"
_USUAL_NAMES = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "bs": "batch_size",
    "batch": "batch_size",
    "num_workers": "workers",
    "lambda": "balance",
    "z": "ratio",
    "grad_clip": "clip_norm",
    "amp": "precision",
    "num_classes": "classes",
}


def flat(settings: Settings) -> dict[str, Any]:
    """Return all settings by name: the shared ones, those of every method, and whatever a subclass adds."""
    values: dict[str, Any] = {}
    for name, value in asdict(settings).items():
        values |= _nested(settings) if name == _NESTED else {name: value}
    return values


def with_overrides(settings: AnySettings, overrides: Mapping[str, Any] | None = None, **more: Any) -> AnySettings:
    """Return the settings with some values replaced; an unknown name is refused with the nearest one.

    >>> with_overrides(Settings(), epochs=3, elastic_start=0.3).epochs
    3
    """
    overrides = {**(overrides or {}), **more}
    if isinstance(overrides.get("method"), str):
        find(overrides["method"])  # before names that only an unknown method would know
    known = list(flat(settings))
    for name, value in overrides.items():
        if name not in known and (name != _NESTED or isinstance(value, Text)):
            raise InvalidArgumentError(f"no setting is called {name}; {_hint(name, known)}")
    return _replaced(settings, overrides)


def from_text(settings: AnySettings, assignments: Iterable[str]) -> AnySettings:
    """Return the settings with values replaced as a command line gives them.

    >>> from_text(Settings(), ["epochs=3", "ratio=0.05,0.8", "nesterov=false"]).ratio
    (0.05, 0.8)
    """
    overrides = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise InvalidArgumentError(f"--set {assignment}: there is no '='; allowed: key=value, as in epochs=10")
        overrides[name.strip()] = Text(text.strip())
    return with_overrides(settings, overrides)


def from_plain(settings: AnySettings, stored: Mapping[str, Any]) -> AnySettings:
    """Return the settings with those replaced that were stored as JSON; names that nobody knows here are left out."""
    known = flat(settings)
    texts = {name: Text(value) if isinstance(value, str) else value for name, value in stored.items()}
    return _replaced(settings, {name: value for name, value in texts.items() if name in known})


def _kinds(settings: Settings) -> list[type[MethodSettings]]:
    """Return the classes of all methods' settings, that of the settings' own method last."""
    own = kinds({settings.method} & METHODS.keys())
    every = dict.fromkeys((*kinds(), *map(type, settings.of_methods)))
    return [*(kind for kind in every if kind not in own), *own]


def _nested(settings: Settings) -> dict[str, Any]:
    """Return the settings of single methods by name, in the order in which the methods were registered.

    Where two methods share a name, the value of the method that is trained counts.
    """
    values = {name: value for kind in _kinds(settings) for name, value in vars(settings.of(kind)).items()}
    order = dict.fromkeys(each.name for kind in (*kinds(), *_kinds(settings)) for each in fields(kind))
    return {name: values[name] for name in order}


def _replaced(settings: AnySettings, overrides: Mapping[str, Any]) -> AnySettings:
    shared = {each.name: overrides[each.name] for each in fields(settings) if each.name in overrides}
    settings = replace(settings, **shared)
    own = [_part_replaced(settings.of(kind), overrides) for kind in _kinds(settings)]
    return replace(settings, of_methods=tuple(own))


def _part_replaced(own: MethodSettings, overrides: Mapping[str, Any]) -> MethodSettings:
    return replace(own, **{each.name: overrides[each.name] for each in fields(own) if each.name in overrides})


def _hint(name: str, known: list[str]) -> str:
    plain = name.replace("-", "_").lower()
    near = [_USUAL_NAMES[plain]] if plain in _USUAL_NAMES else difflib.get_close_matches(plain, known, n=1)
    return f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}"
