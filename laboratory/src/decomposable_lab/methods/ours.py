"""How the library's own methods are compared: the trainings of each, its curves, and its line in a figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decomposable.core.forms import MATRIX_FORMS, short_form
from decomposable.recipes.settings import Settings
from decomposable.training.methods import METHODS, find
from decomposable_lab.methods.base import LineStyle, Training

SHORT_CRITERIA = {"singular_value": "sv", "energy": "eng", "uniform": "uni", "taylor": "tay"}
_STYLES = {
    "plain": LineStyle(color="#666666", marker="v", linestyle="--", place=5),
    "decomposable": LineStyle(color="#0072B2", marker="o", linewidth=2.8, zorder=6, place=0),
    "elastic": LineStyle(color="#CC79A7", marker="*", linewidth=2.8, markersize=11, zorder=7, place=-1),
}


def style_of(name: str) -> LineStyle | None:
    """Return the line of a method in a figure; None where it says nothing."""
    return _STYLES.get(name) or getattr(METHODS.get(name), "style", None)


def trainings_of(name: str, settings: Settings) -> tuple[Training, ...]:
    """Return what a comparison trains of a method; one training where the method does not say it."""
    if name == "plain":  # one, whose network is decomposed in every way
        return (Training(curve="base", variants=each_form_and_criterion("base")),)
    trainings = getattr(find(name), "trainings", None)
    return (Training(curve=name),) if trainings is None else trainings(settings)


def short_name(prefix: str, form: str, criterion: str) -> str:
    """Return how the paper's figures call it.

    >>> short_name("base", "spatial", "energy")
    'base_sp_eng'
    """
    return f"{prefix}_{short_form(form)}_{SHORT_CRITERIA[criterion]}"


def each_form_and_criterion(prefix: str) -> dict[str, Mapping[str, Any]]:
    """Return all ways to decompose one network, by their names."""
    return {
        short_name(prefix, form, criterion): {"form": form, "criterion": criterion}
        for form in MATRIX_FORMS
        for criterion in SHORT_CRITERIA
    }
