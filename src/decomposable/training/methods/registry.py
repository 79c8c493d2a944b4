"""The methods that there are, by name: whatever is in `METHODS` is trained, resumed, compared and drawn.

A leaf of this room, so that the settings know those of every method without importing any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decomposable.training.methods.base import Method
    from decomposable.recipes.values import MethodSettings

METHODS: dict[str, Method] = {}
BUILT_IN: set[str] = set()
"""The names of those that come with the package."""

_LISTED_FIRST = (
    *("width", "widths", "width_loss", "width_range", "random_widths", "width_multiple", "ranks"),
    *("trp_energy", "trp_strength", "trp_interval", "trp_layers", "vbmf_form"),
    *("compare_widths", "compare_ranks", "compare_energies", "compare_strengths", "compare_forms"),
    *("compare_vbmf_forms", "tuning_epochs", "tuning_rates", "tuning_weight_decays", "tuning_schedules"),
)
"""The order in which settings have always been listed and stored; those of other methods follow."""


def kinds(names: Iterable[str] | None = None) -> list[type[MethodSettings]]:
    """The classes of the settings that these methods, or all, have of their own."""
    found = (getattr(METHODS[name], "settings", None) for name in (METHODS if names is None else names))
    return list(dict.fromkeys(kind for kind in found if kind is not None))


def own_defaults(names: Iterable[str] | None = None) -> Mapping[str, Any]:
    """These settings by name, as they are where nobody sets them."""
    return _defaults(tuple(kinds(names)))


@lru_cache
def _defaults(of_kinds: tuple[type[MethodSettings], ...]) -> Mapping[str, Any]:
    """Kept: settings ask for them whenever they are made or read."""
    values = {name: value for kind in of_kinds for name, value in vars(kind()).items()}
    return MappingProxyType({name: values[name] for name in dict.fromkeys((*_LISTED_FIRST, *values)) if name in values})


def of_other_methods(method: str) -> set[str]:
    """The settings that single methods have of their own, but for those that this method has too.

    No training of this one depends on them: who goes on with it may have others, or have registered other methods.
    """
    return own_defaults(METHODS.keys() - {method}).keys() - own_defaults(METHODS.keys() & {method}).keys()
