"""What a figure of a comparison says in words: its title, what its marks are, and what it calls every line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from decomposable import recipes
from decomposable.training.methods import METHODS
from decomposable_lab.methods.base import LineStyle

HERO = "elastic"
"""The method that a comparison is about: its line is the boldest."""
IN_WORDS = {
    "tucker_vbmf_ft": "Tucker-2 at VBMF's ranks, tuned",
    "ch_vbmf_ft": "channel form at VBMF's ranks, tuned",
    "sp_vbmf_ft": "spatial form at VBMF's ranks, tuned",
}
"""What a figure calls curves whose names are the paper's short ones."""
TRIED = {"plain": "ways to cut", "trp": "trainings", "tucker": "forms"}
"""What the several curves of a method are."""


def title_of(content: Mapping[str, Any], folder: Path | None = None) -> str:
    """Return what was trained and, where the records in the comparison's folder agree on it, for how many epochs."""
    epochs = None if folder is None else _epochs_in(folder)
    trained = _in_words(content["recipe"])
    return trained if epochs is None else f"{trained}, {epochs} epoch{'' if epochs == 1 else 's'}"


def _in_words(recipe: str) -> str:
    """Return the network and the data of a recipe of the package, as its docstring begins; of others their name."""
    if recipe not in recipes.BUILT_IN:  # looking at a function of somebody else would run their module
        return recipe
    without_brackets = re.sub(r" \(.*?\)", "", recipes.find(recipe).__doc__ or "")
    return re.split(r"[,:;.](?:\s|$)", without_brackets)[0] or recipe


def _epochs_in(folder: Path) -> int | None:
    """How long a method was trained, if all that have one training say the same: tuning has epochs of its own."""
    found = set()
    for path in folder.glob("*/*/record.json"):
        record = json.loads(path.read_bytes())
        settings = record.get("settings") if isinstance(record, dict) else None
        if isinstance(settings, dict) and isinstance(epochs := settings.get("epochs"), int):
            found.add(epochs)
    return found.pop() if len(found) == 1 else None


def explained(seeds: Iterable[int], styles: Iterable[LineStyle]) -> str:
    """Return what the marks of a figure are."""
    *others, last = map(str, seeds)
    spread = f"Mean of seeds {', '.join(others)} and {last}; bands and bars are their range"
    if not others:
        spread = f"Seed {last} alone, so without a range"
    points = "\nA line: trained once, then cut without retraining. Single points: trained for that size alone."
    are_alone = any(style.linestyle == "none" for style in styles)
    return f"{spread}. One protocol for all methods.{points if are_alone else ''}"


def label_of(name: str) -> str:
    """Return what a figure calls a method, or one of its curves."""
    return getattr(METHODS.get(name), "label", "") or IN_WORDS.get(name, name)


def method_label(name: str, method: Mapping[str, Any]) -> str:
    """Return the legend of a method in `comparison.json`; of several curves it says which one is shown."""
    count, shown = len(method["curves"]), method["shown"]["label"]
    if count < 2:
        return f"{label_of(name)}\nthis project's own training" if name == HERO else label_of(name)
    tried = f"{count} {TRIED.get(name, 'curves')}"
    if shown not in method["curves"]:
        return f"{label_of(name)}\nat each size the best of {tried}"
    if shown in IN_WORDS:  # of Tucker's method it may be a form that is none of Tucker's
        return f"{IN_WORDS[shown]}\nthe best of {tried}"
    return f"{label_of(name)}\n{shown}, the best of {tried}"
