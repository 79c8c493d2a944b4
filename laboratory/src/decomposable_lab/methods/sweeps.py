"""What the recipes of the library compare of the laboratory's methods, where that is not their default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decomposable import recipes
from decomposable.recipes.settings import Settings
from decomposable.training.methods.flat import with_overrides

# A part of the sweeps, so that all methods together take minutes (digits), or hours and not days on a CPU: energies
# that cut something off at this size.
_SHORT = {"compare_energies": (0.95, 0.99), "compare_strengths": (3e-4,)}
_FASHION = {**_SHORT, "tuning_epochs": 4}
OF_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "decomposable.recipes.small:digits": {**_SHORT, "tuning_epochs": 5},
    "decomposable.recipes.small:fashion": _FASHION,
    "decomposable.recipes.small:fashion_connected": _FASHION,
    "decomposable.recipes.paper:imagenet_resnet50": {
        "width_loss": "sum",
        "compare_energies": (0.999995, 0.999999),
        "compare_strengths": (1e-4, 3e-4, 5e-4),
        "tuning_rates": (0.01,),  # the best of appendix D's grid
        "tuning_weight_decays": (1e-4,),
        "tuning_schedules": ("steps:0.2",),
    },
}


def default_settings(recipe: recipes.Recipe) -> Settings:
    """Return the settings that a recipe has of its own, with those of the laboratory's methods."""
    address = f"{getattr(recipe, '__module__', '')}:{getattr(recipe, '__qualname__', '')}"
    return with_overrides(recipes.default_settings(recipe), OF_RECIPES.get(address, {}))
