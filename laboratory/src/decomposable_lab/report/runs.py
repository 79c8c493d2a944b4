"""A section of the page for a single training: how it went, what its sizes cost and reach, and their ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decomposable_lab.report.sections import Section, figure_of, origin_of

Row = Mapping[str, Any]
LOSSES = {"loss": "full network", "loss_low": "low-rank network"}
_WORDS = {
    "sp": "spatial form",
    "ch": "channel form",
    "sv": "by singular value",
    "eng": "by energy",
    "uni": "uniform",
    "tay": "by Taylor expansion",
}
FACTOR = 3.0
"""What an axis spans before it is better read as a logarithm."""


def of_run(run: Mapping[str, Any]) -> Section:
    """Show learning curves, sizes and ranks of one training."""
    sizes = [row for row in run["sizes"] if isinstance(row, Mapping)]
    epochs = [each for each in run["epochs"] if isinstance(each, Mapping) and _is_number(each.get("epoch"))]
    explorer = run.get("explorer")
    notes = [] if explorer else ["Its network was not kept: the ranks of its layers are not shown."]
    if len(epochs) == 1:
        notes.append(f"It has one epoch, and no curve: {_in_words(epochs[0])}.")
    return Section(
        id="run",
        title=f"{run.get('recipe', 'a run')}: {run['settings'].get('method', '')}",
        where=f"seed {run.get('seed', '–')}, {run.get('steps', '–')} steps",
        figures=[figure_of(figure) for figure in (*_over_size(sizes, is_explored=bool(explorer)), *_by_epoch(epochs))],
        tables=[_table(sizes)],
        notes=notes,
        explorers=[explorer] if explorer else [],
        origin=origin_of(run),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _in_words(epoch: Row) -> str:
    said = {LOSSES.get(key, key): value for key, value in epoch.items() if key.startswith("loss")}
    losses = [f"loss of the {name} {value:.3f}" for name, value in said.items() if _is_number(value)]
    accuracy = epoch.get("accuracy")
    return ", ".join([*losses, *([f"test accuracy {accuracy:.2f}%"] if _is_number(accuracy) else [])]) or "no figures"


def _by_epoch(epochs: Sequence[Row]) -> list[dict[str, Any]]:
    """Curves of what has two epochs at least."""
    losses = dict.fromkeys(key for each in epochs for key in each if key.startswith("loss"))
    shown = {
        ("Loss by epoch", "loss"): [_curve(epochs, key, LOSSES.get(key, _loss_in_words(key))) for key in losses],
        ("Test accuracy by epoch", "test accuracy (%)"): [_curve(epochs, "accuracy", "full size")],
    }
    figures = []
    for (title, label), curves in shown.items():
        if long := [curve for curve in curves if len(curve["x"]) > 1]:
            figures.append({"title": title, "x": {"label": "epoch"}, "y": {"label": label}, "series": long})
    return figures


def _loss_in_words(key: str) -> str:
    """Return which network a loss is of, by its name in the record.

    >>> _loss_in_words("loss_0.25"), _loss_in_words("loss_random1")
    ('width 0.25', 'random width 1')
    """
    which = key.removeprefix("loss_")
    return f"random width {which.removeprefix('random')}" if which.startswith("random") else f"width {which}"


def _curve(epochs: Sequence[Row], key: str, name: str) -> dict[str, Any]:
    having = [each for each in epochs if _is_number(each.get(key))]
    return {"name": name, "x": [each["epoch"] for each in having], "y": [each[key] for each in having]}


def _over_size(sizes: Sequence[Row], *, is_explored: bool) -> list[dict[str, Any]]:
    """What the network reaches at its sizes, for each way that it was cut. The slider shows one such curve itself."""
    costs = {"macs_fraction": "MACs", "params_fraction": "parameters"}
    cost = next((key for key in costs if any(_is_number(row.get(key)) for row in sizes)), "")
    measured = "perplexity" if any(_is_number(row.get("perplexity")) for row in sizes) else "accuracy"
    having = [row for row in sizes if _is_number(row.get(cost)) and _is_number(row.get(measured)) and row[cost] > 0]
    names = _curves(having)
    if len(having) < 2 or (is_explored and measured == "accuracy" and len(names) < 2):
        return []
    values = [row[measured] for row in having]
    return [
        {
            "title": f"{'Perplexity' if measured == 'perplexity' else 'Test accuracy'} over size",
            "x": {"label": f"{costs[cost]}, as a fraction of the original network's", "is_log": True},
            "y": {
                "label": "perplexity (lower is better)" if measured == "perplexity" else "test accuracy (%)",
                "is_log": measured == "perplexity" and min(values) > 0 and max(values) > FACTOR * min(values),
            },
            "series": [
                {
                    "name": _curve_in_words(name) or measured,
                    "x": [row[cost] for row in having if _curve_of(row) == name],
                    "y": [row[measured] for row in having if _curve_of(row) == name],
                }
                for name in names
            ],
        }
    ]


def _curve_of(row: Row) -> str:
    return str(row.get("curve") or "")


def _curves(sizes: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(map(_curve_of, sizes)))


def _curve_in_words(name: str) -> str:
    """Return how a network was cut, where the name is the paper's short one.

    >>> _curve_in_words("base_sp_sv"), _curve_in_words("us-net")
    ('spatial form, by singular value', 'us-net')
    """
    parts = name.split("_")
    if len(parts) == 3 and parts[1] in _WORDS and parts[2] in _WORDS:
        return f"{_WORDS[parts[1]]}, {_WORDS[parts[2]]}"
    return name


def _table(sizes: Sequence[Row]) -> dict[str, Any]:
    """Return the sizes, and of what some of them have a column each."""
    columns: dict[str, Callable[[Row], str]] = {
        "size": lambda row: _part(row, "size", 2),
        "MACs": lambda row: _count(row, "macs"),
        "of all MACs": lambda row: _part(row, "macs_fraction", 3),
        "parameters": lambda row: _count(row, "params"),
        "of all parameters": lambda row: _part(row, "params_fraction", 3),
        "accuracy (%)": lambda row: _part(row, "accuracy", 2),
    }
    if len(_curves(sizes)) > 1:
        columns = {"cut": lambda row: _curve_in_words(_curve_of(row)) or "–", **columns}
    if any(_is_number(row.get("perplexity")) for row in sizes):
        columns["perplexity"] = lambda row: _part(row, "perplexity", 2)
    if any(_ranks(row) for row in sizes):
        columns["smallest rank"] = lambda row: str(min(_ranks(row), default="–"))
        columns["largest rank"] = lambda row: str(max(_ranks(row), default="–"))
    return {
        "title": "Sizes",
        "columns": list(columns),
        "rows": [[show(row) for show in columns.values()] for row in sizes],
    }


def _ranks(row: Row) -> list[int]:
    ranks = row.get("ranks")
    values = list(ranks.values()) if isinstance(ranks, Mapping) else ranks if isinstance(ranks, list) else []
    return [value for value in values if isinstance(value, int)]


def _count(row: Row, key: str) -> str:
    return f"{row[key]:,}" if isinstance(row.get(key), int) else "–"


def _part(row: Row, key: str, digits: int) -> str:
    return f"{row[key]:.{digits}f}" if _is_number(row.get(key)) else "–"
