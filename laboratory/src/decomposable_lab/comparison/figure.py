"""Accuracy over size, the figure that every comparison of this project ends in: mean and range over some runs.

Of a comparison it has a line for every method. Every method says itself what it is called and how it is drawn; whatever
says nothing has its name, and a line that is no other's. Where the best networks are close together, a second panel
shows them magnified. A figure is drawn again from what lies beside it, with `title_of` of `captions`:

    content = json.loads((folder / "comparison.json").read_text())
    (folder / "comparison.png").write_bytes(draw(content, title=title_of(content, folder)))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import cycle
from typing import Any, NamedTuple

from decomposable.commands.figure import (
    AXES,
    OTHER_COLOURS,
    OTHER_MARKERS,
    TICKS,
    as_png,
    blank_figure,
    set_sizes,
    with_margin,
)
from decomposable_lab.comparison.captions import HERO, explained, method_label, title_of
from decomposable_lab.methods.base import LineStyle
from decomposable_lab.methods.ours import style_of

MAGNIFIED_TICKS = (1.0, 0.75, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2)
SEEN_BELOW = 12.0
"""Accuracies so many points below every method's best one are left out of sight: they would flatten everything else."""
SEEN_TIMES = 2.0
"""So are perplexities above so many times every method's best one."""
MAGNIFIED_FROM = 0.19
"""The second panel has the sizes from a fifth up (a network asked for a fifth is a little smaller than that)."""


class Window(NamedTuple):
    """Hold the limits of a panel: sizes from left to right, values from bottom to top."""

    left: float
    right: float
    bottom: float
    top: float


def draw(content: Mapping[str, Any], *, title: str = "") -> bytes:
    """Return the figure of `comparison.json` as a PNG; `title_of` says its title where none is given."""
    return as_png(figure_of(content, title=title))


def figure_of(content: Mapping[str, Any], *, title: str = "") -> Any:
    """Draw `comparison.json` with matplotlib: accuracy over size for images, perplexity for text."""
    measured, styles = measured_by(content), _styles_of(content["methods"])
    shown = {name: content["methods"][name]["shown"]["points"] for name in styles}
    whole = _whole(list(shown.values()), measured)
    near = _magnified(list(shown.values()), whole, measured)
    figure, panels = blank_figure(
        size=(12, 7.2) if near else (11, 6),
        title=f"{title or title_of(content)}: {measured} over size",
        text=explained(content["seeds"], styles.values()),
        measured=AXES[measured],
        panels=2 if near else 1,
    )
    for name, style in styles.items():
        for panel in panels:
            _draw_method(panel, method_label(name, content["methods"][name]), style, shown[name], measured)
    _set_window(panels[0], whole, TICKS)
    if near:
        _set_window(panels[1], near, MAGNIFIED_TICKS)
        _frame(panels, near)
    _add_legend(figure, panels[0], [name == HERO for name in styles], is_below=near is not None)
    return figure


def _styles_of(names: Iterable[str]) -> dict[str, LineStyle]:
    """Return how each of these methods is drawn, in the order of the legend."""
    others = (LineStyle(color=c, marker=m) for c, m in zip(cycle(OTHER_COLOURS), cycle(OTHER_MARKERS), strict=True))
    styles = {name: style_of(name) or next(others) for name in names}
    if HERO in styles and len(styles) > 1:
        styles = {name: replace(style, linewidth=0.8 * style.linewidth) for name, style in styles.items()}
        styles[HERO] = replace(styles[HERO], linewidth=4.0, markersize=13.0, zorder=6.5)
    return dict(sorted(styles.items(), key=lambda item: item[1].place))


def measured_by(content: Mapping[str, Any]) -> str:
    """Return how a comparison judges networks: by "accuracy" or, if every point has one, "perplexity"."""
    points = [point for method in content["methods"].values() for point in method["shown"]["points"]]
    return "perplexity" if points and all(point.get("perplexity") for point in points) else "accuracy"


def spread_of(point: Mapping[str, Any], measured: str) -> tuple[float, float, float]:
    """Return the mean over the seeds, the lowest and the highest."""
    values = point["perplexity"] if measured == "perplexity" else [point[k] for k in ("accuracy", "lowest", "highest")]
    mean, lowest, highest = values
    return mean, lowest, highest


def _draw_method(axes: Any, label: str, style: LineStyle, points: Sequence[Mapping[str, Any]], measured: str) -> None:
    """The line of a method, and its range over the seeds."""
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


def _whole(methods: Sequence[Sequence[Mapping[str, Any]]], measured: str) -> Window:
    """Of the values those that can be told apart, every method's best included; of the sizes all that are in sight."""
    points = [(point["macs_fraction"], *spread_of(point, measured)) for curve in methods for point in curve]
    lowest, highest = min(low for *_, low, _ in points), max(high for *_, high in points)
    means = [[spread_of(point, measured)[0] for point in curve] for curve in methods]
    if measured == "accuracy":
        bottom = max(lowest, min(map(max, means)) - SEEN_BELOW)
        limits = with_margin(bottom, highest, most=100)
        in_sight = [size for size, mean, *_ in points if mean >= bottom]
    else:
        top = min(highest, max(map(min, means)) * SEEN_TIMES)
        limits = with_margin(lowest, top)
        in_sight = [size for size, mean, *_ in points if mean <= top]
    return Window(0.88 * min(in_sight), 1.06, *limits)


def _magnified(methods: Sequence[Sequence[Mapping[str, Any]]], whole: Window, measured: str) -> Window | None:
    """Around what the first method reaches down to a fifth of the MACs, if that is hard to see in the whole."""
    near = [[p for p in points if p["macs_fraction"] >= MAGNIFIED_FROM] for points in methods]
    reached = [spread_of(point, measured)[0] for point in near[0]]
    if not reached or whole.left > MAGNIFIED_FROM:
        return None
    if measured == "accuracy":
        top = max(spread_of(point, measured)[2] for points in near for point in points)
        limits = with_margin(min(reached) - 0.25 * (top - min(reached)), top, most=100)
    else:
        bottom = min(spread_of(point, measured)[1] for points in near for point in points)
        limits = with_margin(bottom, max(reached) + 0.25 * (max(reached) - bottom))
    is_small = limits[1] - limits[0] < 0.5 * (whole.top - whole.bottom)
    inside = sum(any(limits[0] <= spread_of(p, measured)[0] <= limits[1] for p in points) for points in near)
    return Window(MAGNIFIED_FROM, 1.04, *limits) if is_small and inside > 2 else None  # two are told apart as they are


def _frame(panels: Sequence[Any], near: Window) -> None:
    """A frame around what the second panel magnifies, and a word over each panel."""
    from matplotlib.patches import Rectangle

    size = near.right - near.left, near.top - near.bottom
    look: dict[str, Any] = {"fill": False, "edgecolor": "#888888", "linewidth": 1.2, "zorder": 10}
    panels[0].add_patch(Rectangle((near.left, near.bottom), *size, **look))
    for axes, word in zip(panels, ("all sizes", "what is in the frame, magnified"), strict=True):
        above = {"xytext": (0, 7), "textcoords": "offset points", "fontsize": 12, "fontstyle": "italic"}
        axes.annotate(word, (0, 1), xycoords="axes fraction", **above).set_in_layout(False)
    panels[1].spines[["top", "right"]].set_visible(True)
    panels[1].spines[:].set_color("#888888")


def _add_legend(figure: Any, axes: Any, are_bold: Sequence[bool], *, is_below: bool) -> None:
    """The methods in their order, once for all panels."""
    how: dict[str, Any] = {"loc": "outside right center", "labelspacing": 0.9}
    if is_below:
        how = {"loc": "outside lower center", "ncols": 3, "columnspacing": 2.5, "labelspacing": 0.7}
    legend = figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=11.5, handlelength=3, **how)
    for text, is_bold in zip(legend.get_texts(), are_bold, strict=True):
        text.set_fontweight("bold" if is_bold else "normal")


def _set_window(axes: Any, window: Window, ticks: Iterable[float]) -> None:
    """What is in sight, and the sizes that are named."""
    axes.set_ylim(window.bottom, window.top)
    set_sizes(axes, window.left, window.right, [size for size in ticks if size >= window.left])
