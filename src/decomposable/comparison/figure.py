"""The figure of a comparison: accuracy over MACs, a line for every method, mean and range over the seeds."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

# The colours of Okabe and Ito, told apart by shape and dashes as well; ours is drawn last, above the others.
STYLES: Mapping[str, dict[str, Any]] = {
    "decomposable": {"color": "#0072B2", "marker": "o", "linestyle": "-", "linewidth": 2.8, "zorder": 6},
    "us-net": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    "slimmable": {"color": "#E69F00", "marker": "D", "linestyle": ":"},
    "trp": {"color": "#009E73", "marker": "^", "linestyle": "-."},
    "tucker": {"color": "#CC79A7", "marker": "P", "linestyle": ":"},
    "plain": {"color": "#666666", "marker": "v", "linestyle": "--"},
    "width": {"color": "#000000", "marker": "*", "linestyle": "none", "markersize": 13, "zorder": 7},
    "scratch": {"color": "#56B4E9", "marker": "X", "linestyle": "none", "markersize": 10, "zorder": 8},
}
NAMES = {
    "decomposable": "Decomposable-Net",
    "us-net": "US-Net",
    "slimmable": "slimmable network",
    "trp": "TRP",
    "tucker": "Tucker, VBMF, fine-tuned",
    "plain": "normal learning, decomposed",
    "width": "fewer channels, trained alone",
    "scratch": "our ranks, trained from scratch",
}
TICKS = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.03, 0.02, 0.01)
SEEN_BELOW = 12.0
"""Accuracies so many points below every method's best one are left out of sight: they would flatten everything else."""


def draw(content: Mapping[str, Any]) -> bytes:
    """The figure of `comparison.json` as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: no window and no global state

    figure = Figure(figsize=(11, 5.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    shown = [name for name in STYLES if name in content["methods"]]
    for name in shown:
        _draw_method(axes, name, content["methods"][name])
    _set_limits(axes, [content["methods"][name]["shown"]["points"] for name in shown])
    seeds = len(content["seeds"])
    axes.set_title(f"{content['recipe']}: accuracy over size", loc="left", fontsize=15, fontweight="bold", pad=26)
    runs = f"mean and range of {seeds} runs" if seeds > 1 else "one run"
    text = f"One protocol for all methods, {runs}. Thin: each curve of a method that has several."
    axes.text(0, 1.03, text, transform=axes.transAxes, fontsize=10.5, color="#444444").set_in_layout(False)
    axes.set_xlabel("MACs, as a fraction of the original network's", fontsize=11)
    axes.set_ylabel("test accuracy (%)", fontsize=11)
    axes.minorticks_off()
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=10, labelspacing=0.9)
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def _draw_method(axes: Any, name: str, method: Mapping[str, Any]) -> None:
    style = {"markersize": 7.5, "linewidth": 2.0, "zorder": 4, "markeredgecolor": "white", **STYLES[name]}
    label, points = method["shown"]["label"], method["shown"]["points"]
    for curve in method["curves"].values():
        if len(method["curves"]) > 1:
            thin = {"color": style["color"], "linewidth": 0.9, "alpha": 0.35, "zorder": 2, "marker": style["marker"]}
            axes.plot(*_line(curve), markersize=3 if len(curve) > 1 else 5, **thin)
    x, y = _line(points)
    if any(point["seeds"] > 1 for point in points):
        low, high = [p["lowest"] for p in points], [p["highest"] for p in points]
        if style["linestyle"] == "none":
            spread = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
            axes.errorbar(x, y, yerr=spread, fmt="none", ecolor=style["color"], elinewidth=1.2, capsize=3, zorder=3)
        else:
            axes.fill_between(x, low, high, color=style["color"], alpha=0.15, lw=0)
    several = f"\n{label}" if len(method["curves"]) > 1 else ""
    axes.plot(x, y, label=NAMES[name] + several, **style)


def _line(points: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    return [p["macs_fraction"] for p in points], [p["accuracy"] for p in points]


def _set_limits(axes: Any, methods: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """The sizes on a logarithmic axis; of the accuracies those that can be told apart, every method's best included."""
    points = [point for curve in methods for point in curve]
    worst_best = min((max(p["accuracy"] for p in curve) for curve in methods), default=0.0)
    bottom = max(min((p["lowest"] for p in points), default=0.0), worst_best - SEEN_BELOW)
    top = max((p["highest"] for p in points), default=100.0)
    margin = 0.03 * (top - bottom) + 0.1
    axes.set_ylim(bottom - margin, min(top + margin, 100 + margin / 2))
    smallest = min((p["macs_fraction"] for p in points if p["accuracy"] >= bottom), default=0.1)
    axes.set_xscale("log")
    axes.set_xlim(0.88 * smallest, 1.06)
    ticks = [size for size in TICKS if size >= 0.88 * smallest]
    axes.set_xticks(ticks, [f"{size:g}" for size in ticks])
