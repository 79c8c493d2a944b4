"""Accuracy over size: the figure that every comparison of this project ends in."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Blue, vermilion and green of Okabe and Ito, told apart by shape and dashes as well.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "marker": "o", "linestyle": "-", "zorder": 4},
    {"color": "#D55E00", "marker": "s", "linestyle": "--", "zorder": 3},
    {"color": "#009E73", "marker": "^", "linestyle": "-.", "zorder": 3},
    {"color": "#CC79A7", "marker": "D", "linestyle": ":", "zorder": 3},
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Accuracies (percent) of a network at some sizes (parts of the original's MACs), and their range if known."""

    label: str
    sizes: Sequence[float]
    accuracies: Sequence[float]
    lowest: Sequence[float] = ()
    highest: Sequence[float] = ()


def blank(*, size: tuple[float, float], dpi: int, title: str, text: str) -> tuple[Any, Any]:
    """A figure of accuracy over MACs, and its axes, in which nothing is drawn yet."""
    from matplotlib.figure import Figure  # not pyplot: no window and no global state

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=15, fontweight="bold", pad=26)
    line = axes.text(0, 1.03, text, transform=axes.transAxes, fontsize=10.5, color="#444444")
    line.set_in_layout(False)  # a long one must not make the axes narrower
    axes.set_xlabel("MACs, as a fraction of the original network's", fontsize=11)
    axes.set_ylabel("test accuracy (%)", fontsize=11)
    axes.set_xscale("log")
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def set_sizes(axes: Any, smallest: float, largest: float, ticks: Sequence[float]) -> None:
    """The limits of the sizes, and those that are named."""
    axes.set_xlim(smallest, largest)
    axes.set_xticks(ticks, [f"{size:g}" for size in ticks])
    axes.minorticks_off()


def as_png(figure: Any) -> bytes:
    """The figure as a file's content."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def draw_curves(curves: Sequence[Curve], *, title: str, message: str, caption: str, ticks: Sequence[float]) -> bytes:
    """The curves as a PNG; their points at `ticks` are marked, and the last ones named."""
    figure, axes = blank(size=(8, 4.8), dpi=160, title=title, text=message)
    for curve, style in zip(curves, STYLES, strict=False):
        _draw(axes, curve, style, ticks)
    set_sizes(axes, 0.84 * min(ticks), 1.05, ticks)
    axes.set_ylim(top=100)
    axes.legend(loc="lower right", frameon=False, fontsize=11, title=caption, alignment="left")
    return as_png(figure)


def _draw(axes: Any, curve: Curve, style: dict[str, Any], ticks: Sequence[float]) -> None:
    """The line, marked at the ticks; the range as a band; the last value beside its point."""
    if curve.lowest:
        axes.fill_between(curve.sizes, curve.lowest, curve.highest, color=style["color"], alpha=0.15, lw=0)
    marked = [size in ticks for size in curve.sizes]
    look = {**style, "linewidth": 2.5, "markersize": 8, "markeredgecolor": "white"}
    axes.plot(curve.sizes, curve.accuracies, label=curve.label, markevery=marked, **look)
    last = min(range(len(curve.sizes)), key=lambda i: curve.sizes[i])
    end = {"xytext": (-9, 0), "textcoords": "offset points", "ha": "right", "va": "center", "fontweight": "bold"}
    place = curve.sizes[last], curve.accuracies[last]
    axes.annotate(f"{curve.accuracies[last]:.0f}%", place, color=style["color"], **end)
