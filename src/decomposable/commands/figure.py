"""Small figures: accuracy or time over size, drawn by matplotlib, which is an extra.

`train`, `cut`, `demo` and `bench` draw with it; so does the laboratory.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

# Of Paul Tol's muted colours those that are not near one of Okabe and Ito, which the methods of the package have.
OTHER_COLOURS = ("#882255", "#332288", "#999933", "#AA4499", "#117733")
OTHER_MARKERS = ("h", "<", ">", "p", "d", "8", "H")
TICKS = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)
AXES = {"accuracy": "test accuracy (%)", "perplexity": "perplexity of the test text (lower is better)"}
# Blue, vermilion, green and purple of Okabe and Ito, told apart by shape and dashes as well.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "marker": "o", "linestyle": "-", "zorder": 4},
    {"color": "#D55E00", "marker": "s", "linestyle": "--", "zorder": 3},
    {"color": "#009E73", "marker": "^", "linestyle": "-.", "zorder": 3},
    {"color": "#CC79A7", "marker": "D", "linestyle": ":", "zorder": 3},
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Accuracies (percent; of a text its perplexities) of a network at some sizes (parts of the original's MACs), and
    their range if known.
    """

    label: str
    sizes: Sequence[float]
    accuracies: Sequence[float]
    lowest: Sequence[float] = ()
    highest: Sequence[float] = ()


def set_sizes(axes: Any, smallest: float, largest: float, ticks: Sequence[float]) -> None:
    """Set the limits of the sizes, and those that are named."""
    axes.set_xlim(smallest, largest)
    axes.set_xticks(ticks, [f"{size:g}" for size in ticks])
    axes.minorticks_off()


def as_png(figure: Any) -> bytes:
    """Return the figure as a file's content."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def draw_curves(
    curves: Sequence[Curve],
    *,
    title: str,
    message: str,
    caption: str,
    ticks: Sequence[float] = (),
    measured: str = "test accuracy",
    unit: str = "%",
) -> bytes:
    """Return the curves as a PNG: marked at `ticks`, or at all points; the last points have their values."""
    named = f"{measured} ({unit})" if unit else measured
    figure, (axes,) = blank_figure(size=(8, 4.8), dpi=160, title=title, text=message, measured=named)
    for curve, style in zip(curves, _styles(), strict=False):
        _draw(axes, curve, style, ticks or curve.sizes)
        if len(curves) <= len(STYLES):  # of more, the numbers would lie on one another
            _name_last(axes, curve, style["color"], unit)
    smallest = min(min(ticks or curve.sizes) for curve in curves)
    set_sizes(axes, 0.76 * smallest, 1.05, ticks or [size for size in TICKS if size >= 0.9 * smallest])
    values = [value for curve in curves for value in (*curve.accuracies, *curve.lowest, *curve.highest)]
    axes.set_ylim(*with_margin(min(values), max(values), most=100 if unit == "%" else math.inf))
    axes.legend(loc="best", frameon=False, fontsize=11, title=caption, alignment="left")
    return as_png(figure)


def _styles() -> Iterator[dict[str, Any]]:
    yield from STYLES
    for color, marker in zip(cycle(OTHER_COLOURS), cycle(OTHER_MARKERS), strict=True):
        yield {"color": color, "marker": marker, "linestyle": "-", "zorder": 3}


def draw_times(times: Mapping[str, Sequence[tuple[float, float, float, float]]], *, title: str, message: str) -> bytes:
    """Return milliseconds over size as a PNG: for every name its sizes, each with median and middle half of times."""
    figure, (axes,) = blank_figure(size=(8, 4.8), dpi=160, title=title, text=message, measured="milliseconds a pass")
    for (name, points), style in zip(times.items(), _styles(), strict=False):
        sizes, medians, lows, highs = zip(*sorted(points), strict=True)
        axes.fill_between(sizes, lows, highs, color=style["color"], alpha=0.15, lw=0)
        axes.plot(sizes, medians, label=name, linewidth=2.5, markersize=7, markeredgecolor="white", **style)
    smallest = min(size for points in times.values() for size, *_ in points)
    set_sizes(axes, 0.88 * smallest, 1.06, [tick for tick in TICKS if 0.9 * smallest <= tick])
    axes.set_ylim(bottom=0)
    said = "line: median of the passes\nband: their middle half"
    axes.legend(loc="upper left", frameon=False, fontsize=11, title=said, alignment="left")
    return as_png(figure)


def _draw(axes: Any, curve: Curve, style: dict[str, Any], ticks: Sequence[float]) -> None:
    if curve.lowest:
        axes.fill_between(curve.sizes, curve.lowest, curve.highest, color=style["color"], alpha=0.15, lw=0)
    marked = [size in ticks for size in curve.sizes]
    look = {**style, "linewidth": 2.5, "markersize": 8, "markeredgecolor": "white"}
    axes.plot(curve.sizes, curve.accuracies, label=curve.label, markevery=marked, **look)


def _name_last(axes: Any, curve: Curve, color: str, unit: str) -> None:
    last = min(range(len(curve.sizes)), key=lambda i: curve.sizes[i])
    end = {"xytext": (-9, 0), "textcoords": "offset points", "ha": "right", "va": "center", "fontweight": "bold"}
    value = curve.accuracies[last]
    said = f"{value:.1f}%" if unit == "%" else f"{value:.2f}"
    axes.annotate(said, (curve.sizes[last], value), color=color, **end)


def with_margin(bottom: float, top: float, most: float = math.inf) -> tuple[float, float]:
    """Return limits with a little room; above `most`, which no value exceeds, only for the marks."""
    margin = 0.04 * (top - bottom) + 0.05
    return bottom - margin, min(top + margin, most + margin / 2)


def blank_figure(
    *, size: tuple[float, float], title: str, text: str, measured: str, panels: int = 1, dpi: int = 150
) -> tuple[Any, list[Any]]:
    """Return a figure of what is measured over MACs, and its empty panels."""
    from matplotlib.figure import Figure  # not pyplot: no window and no global state

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    made = list(figure.subplots(1, panels, squeeze=False)[0])
    above = 20 if panels > 1 else 0  # where each panel says what it is
    font = 16 * min(1, 6.5 * size[0] / max(1, len(title)))  # a long one is smaller, so that it is not cut off
    made[0].set_title(title, loc="left", fontsize=font, fontweight="bold", pad=12 + above + 16 * len(text.splitlines()))
    place = {"xytext": (0, 10 + above), "textcoords": "offset points", "fontsize": 11.5, "color": "#444444"}
    made[0].annotate(text, (0, 1), xycoords="axes fraction", **place).set_in_layout(False)  # else it narrows the axes
    made[0].set_ylabel(measured, fontsize=12)
    for axes in made:
        axes.set_xlabel("MACs, as a fraction of the original network's", fontsize=12)
        axes.set_xscale("log")
        axes.tick_params(labelsize=11)
        axes.grid(color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, made
