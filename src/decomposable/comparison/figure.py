"""Accuracy over size, the figure that every comparison of this project ends in: mean and range over some runs.

Of a comparison it has a line for every method. Every method says itself what it is called and how it is drawn; whatever
says nothing has its name, and a line that is no other's.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

from decomposable.methods import METHODS, LineStyle

# Of Paul Tol's muted colours those that are not near one of Okabe and Ito, which the methods of the package have.
OTHER_COLOURS = ("#882255", "#332288", "#999933", "#AA4499", "#117733")
OTHER_MARKERS = ("h", "<", ">", "p", "d", "8", "H")
TICKS = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)
SEEN_BELOW = 12.0
"""Accuracies so many points below every method's best one are left out of sight: they would flatten everything else."""
SEEN_TIMES = 2.0
"""So are perplexities above so many times every method's best one."""
# Blue, vermilion and green of Okabe and Ito, told apart by shape and dashes as well.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "marker": "o", "linestyle": "-", "zorder": 4},
    {"color": "#D55E00", "marker": "s", "linestyle": "--", "zorder": 3},
    {"color": "#009E73", "marker": "^", "linestyle": "-.", "zorder": 3},
    {"color": "#CC79A7", "marker": "D", "linestyle": ":", "zorder": 3},
)


MOST_CURVES = len(STYLES)
IN_WORDS = {"tucker_vbmf_ft": "Tucker-2 form", "ch_vbmf_ft": "channel form", "sp_vbmf_ft": "spatial form"}
"""What a figure calls curves whose names are the paper's short ones."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Accuracies (percent) of a network at some sizes (parts of the original's MACs), and their range if known."""

    label: str
    sizes: Sequence[float]
    accuracies: Sequence[float]
    lowest: Sequence[float] = ()
    highest: Sequence[float] = ()


def draw(content: Mapping[str, Any]) -> bytes:
    """The figure of `comparison.json` as a PNG."""
    return _as_png(figure_of(content))


def figure_of(content: Mapping[str, Any]) -> Any:
    """The figure of `comparison.json`, matplotlib's: of images their accuracy over size, of a text its perplexity."""
    seeds, measured = len(content["seeds"]), measured_by(content)
    runs = f"mean and range of {seeds} runs" if seeds > 1 else "one run"
    figure, axes = _blank(
        size=(11, 5.6),
        dpi=150,
        title=f"{content['recipe']}: {measured} over size",
        text=f"One protocol for all methods, {runs}. Thin: each curve of a method that has several.",
        measured="test accuracy (%)" if measured == "accuracy" else "perplexity of the test text (lower is better)",
    )
    styles = _styles_of(content["methods"])
    for name, style in styles.items():
        _draw_method(axes, getattr(METHODS.get(name), "label", "") or name, style, content["methods"][name], measured)
    shown = [content["methods"][name]["shown"]["points"] for name in styles]
    _set_limits(axes, shown, measured)
    figure.legend(loc="outside right center", frameon=False, fontsize=10, labelspacing=0.9)
    return figure


def _styles_of(names: Iterable[str]) -> dict[str, LineStyle]:
    """How each of these methods is drawn, in the order of the legend."""
    others = (LineStyle(color=c, marker=m) for c, m in zip(cycle(OTHER_COLOURS), cycle(OTHER_MARKERS), strict=True))
    styles = {name: getattr(METHODS.get(name), "style", None) or next(others) for name in names}
    return dict(sorted(styles.items(), key=lambda item: item[1].place))


def measured_by(content: Mapping[str, Any]) -> str:
    """What the networks of a comparison are judged by: "accuracy" or, where every point of it has one, "perplexity"."""
    points = [point for method in content["methods"].values() for point in method["shown"]["points"]]
    return "perplexity" if points and all(point.get("perplexity") for point in points) else "accuracy"


def spread_of(point: Mapping[str, Any], measured: str) -> tuple[float, float, float]:
    """The mean over the seeds, the lowest and the highest."""
    values = point["perplexity"] if measured == "perplexity" else [point[k] for k in ("accuracy", "lowest", "highest")]
    mean, lowest, highest = values
    return mean, lowest, highest


def _draw_method(axes: Any, label: str, style: LineStyle, method: Mapping[str, Any], measured: str) -> None:
    """The line of a method, its range over the seeds, and thin ones for each of its curves."""
    if len(method["curves"]) > 1:
        thin = {"color": style.color, "linewidth": 0.8, "alpha": 0.22, "zorder": 2}
        for curve in method["curves"].values():
            marker = {} if len(curve) > 1 else {"marker": style.marker, "markersize": 5}
            axes.plot(*_line(curve, measured), **thin, **marker)
        label += f"\n{IN_WORDS.get(method['shown']['label'], method['shown']['label'])}"
    points = method["shown"]["points"]
    x, y = _line(points, measured)
    if any(point["seeds"] > 1 for point in points):
        _, low, high = zip(*(spread_of(point, measured) for point in points), strict=True)
        if style.linestyle == "none":
            spread = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
            axes.errorbar(x, y, yerr=spread, fmt="none", ecolor=style.color, elinewidth=1.2, capsize=3, zorder=3)
        else:
            axes.fill_between(x, low, high, color=style.color, alpha=0.15, lw=0)
    look = {key: value for key, value in asdict(style).items() if key != "place"}
    axes.plot(x, y, label=label, markeredgecolor="white", **look)


def _line(points: Sequence[Mapping[str, Any]], measured: str) -> tuple[list[float], list[float]]:
    return [p["macs_fraction"] for p in points], [spread_of(p, measured)[0] for p in points]


def _set_limits(axes: Any, methods: Sequence[Sequence[Mapping[str, Any]]], measured: str) -> None:
    """Of the values those that can be told apart, every method's best included; of the sizes all that are in sight."""
    points = [(point["macs_fraction"], *spread_of(point, measured)) for curve in methods for point in curve]
    lowest, highest = min(low for *_, low, _ in points), max(high for *_, high in points)
    means = [[spread_of(point, measured)[0] for point in curve] for curve in methods]
    if measured == "accuracy":
        bottom = max(lowest, min(map(max, means)) - SEEN_BELOW)
        margin = 0.03 * (highest - bottom) + 0.1
        axes.set_ylim(bottom - margin, min(highest + margin, 100 + margin / 2))
        in_sight = [size for size, mean, *_ in points if mean >= bottom]
    else:
        top = min(highest, max(map(min, means)) * SEEN_TIMES)
        margin = 0.03 * (top - lowest) + 0.01
        axes.set_ylim(lowest - margin, top + margin)
        in_sight = [size for size, mean, *_ in points if mean <= top]
    smallest = min(in_sight)
    _set_sizes(axes, 0.88 * smallest, 1.06, [size for size in TICKS if size >= 0.88 * smallest])


def _blank(
    *, size: tuple[float, float], dpi: int, title: str, text: str, measured: str = "test accuracy (%)"
) -> tuple[Any, Any]:
    """A figure of what is measured over MACs, and its axes, in which nothing is drawn yet."""
    from matplotlib.figure import Figure  # not pyplot: no window and no global state

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=15, fontweight="bold", pad=26)
    line = axes.text(0, 1.03, text, transform=axes.transAxes, fontsize=10.5, color="#444444")
    line.set_in_layout(False)  # a long one must not make the axes narrower
    axes.set_xlabel("MACs, as a fraction of the original network's", fontsize=11)
    axes.set_ylabel(measured, fontsize=11)
    axes.set_xscale("log")
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _set_sizes(axes: Any, smallest: float, largest: float, ticks: Sequence[float]) -> None:
    """The limits of the sizes, and those that are named."""
    axes.set_xlim(smallest, largest)
    axes.set_xticks(ticks, [f"{size:g}" for size in ticks])
    axes.minorticks_off()


def _as_png(figure: Any) -> bytes:
    """The figure as a file's content."""
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
    ticks: Sequence[float],
    measured: str = "test accuracy",
) -> bytes:
    """The curves as a PNG; their points at `ticks` are marked, and the last ones named."""
    figure, axes = _blank(size=(8, 4.8), dpi=160, title=title, text=message, measured=f"{measured} (%)")
    for curve, style in zip(curves, STYLES, strict=False):
        _draw(axes, curve, style, ticks)
    _set_sizes(axes, 0.84 * min(ticks), 1.05, ticks)
    axes.set_ylim(top=100)
    axes.legend(loc="lower right", frameon=False, fontsize=11, title=caption, alignment="left")
    return _as_png(figure)


def draw_times(times: Mapping[str, Sequence[tuple[float, float, float, float]]], *, title: str, message: str) -> bytes:
    """Milliseconds over size as a PNG: for every name its sizes, each with the median and the middle half of times."""
    figure, axes = _blank(size=(8, 4.8), dpi=160, title=title, text=message)
    axes.set_ylabel("milliseconds", fontsize=11)
    for (name, points), style in zip(times.items(), STYLES, strict=False):
        ordered = sorted(points)
        sizes, medians, lows, highs = zip(*ordered, strict=True)
        axes.fill_between(sizes, lows, highs, color=style["color"], alpha=0.15, lw=0)
        axes.plot(sizes, medians, label=name, linewidth=2.5, markersize=7, markeredgecolor="white", **style)
    smallest = min(size for points in times.values() for size, *_ in points)
    _set_sizes(axes, 0.88 * smallest, 1.06, [tick for tick in TICKS if 0.9 * smallest <= tick])
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", frameon=False, fontsize=11)
    return _as_png(figure)


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
