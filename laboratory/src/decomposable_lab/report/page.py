"""Records → one HTML page with everything inside: text, figures, sliders, and the plotting library (plotly.js).

Nothing is loaded from anywhere. Text of records is escaped here, and set as text there (page.js).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from decomposable.training.methods import METHODS
from decomposable_edge.errors import MissingExtraError
from decomposable_edge.machine import timestamp
from decomposable_lab.methods.ours import style_of
from decomposable_lab.report import verdicts
from decomposable_lab.report.finding import Found
from decomposable_lab.report.header import header
from decomposable_lab.report.html import Html, joined, tag
from decomposable_lab.report.runs import of_run
from decomposable_lab.report.sections import Section, id_of, of_exhibit
from decomposable_lab.report.trainings import Trained

READINGS = {"size": "part of the MACs", "accuracy": "accuracy", "macs": "MACs", "params": "parameters"}
SLICES = (
    "One network, trained once: every position is a slice of the same file. Accuracy between measured sizes is "
    "interpolated; hatched layers run dense."
)
_SYMBOLS = {
    "o": "circle",
    "s": "square",
    "D": "diamond",
    "^": "triangle-up",
    "v": "triangle-down",
    "P": "cross",
    "X": "x",
    "*": "star",
}
_SPARE = ("hexagram", "pentagon", "triangle-left", "triangle-right", "hourglass", "bowtie")
_DASHES = {"--": "dash", "-.": "dashdot", ":": "dot"}


def plotting_library() -> str:
    """Return the script of plotly.js, as its Python package has it."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError.of("plotly", "report", "./laboratory") from error
    script: str = get_plotlyjs()
    return script


def page(found: Found, title: str) -> str:
    """Return the whole page."""
    sections = [*map(of_run, found.runs), *map(of_exhibit, found.exhibits)]
    ids = {exhibit["exhibit"]: id_of(exhibit["exhibit"]) for exhibit in found.exhibits}
    content = {
        "sections": [{"figures": section.figures} for section in sections],
        "explorers": [explorer for section in sections for explorer in section.explorers],
        "styles": styles(),
    }
    shown, explorers = [], 0
    for number, section in enumerate(sections):
        shown.append(_section(number, section, explorers, ids))
        explorers += len(section.explorers)
    parts = {
        "title": escape(title),
        "css": _resource("page.css"),
        "header": header(found, title, sections),
        "sections": joined(*shown),
        "made": escape(timestamp()),
        "content": _embedded(content),
        "plotly": plotting_library().replace("</script", "<\\/script"),
        "js": _resource("page.js"),
    }
    return re.sub(r"@([a-z]+)@", lambda match: parts[match[1]], _resource("page.html"))


def styles() -> dict[str, dict[str, Any]]:
    """Return colour, symbol and dash of every method, the same in all figures; no two have the same symbol."""
    found: dict[str, dict[str, Any]] = {}
    spare = iter(_SPARE)
    for name in METHODS:
        if (style := style_of(name)) is not None:
            symbol = _SYMBOLS.get(style.marker, "circle")
            if any(symbol == each["symbol"] for each in found.values()):
                symbol = next(spare, symbol)
            dash = _DASHES.get(style.linestyle, "solid")
            found[name] = {"colour": style.color, "symbol": symbol, "dash": dash, "width": style.linewidth}
    return found


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _embedded(content: object) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _section(number: int, section: Section, explorers: int, ids: Mapping[str, str]) -> Html:
    """Return what there is to look at first, then what it says. `explorers` are those of the sections before."""
    head = [tag("h2", section.title), tag("p", section.where, class_="where")]
    if section.claims:
        head.append(verdicts.marks(section.claims, section.id))
    parts = [tag("div", *head, class_="head")]
    parts += [_explorer(explorers + place, network) for place, network in enumerate(section.explorers)]
    parts += [_shown(f"{number}/{place}", figure, ids) for place, figure in enumerate(section.figures)]
    if section.tables:
        parts.append(tag("div", *(_table(table, ids) for table in section.tables), class_="tables"))
    parts += _claims(section, ids)
    if section.remarks:
        said = (tag("p", verdicts.linked(remark, ids)) for remark in section.remarks)
        parts.append(tag("div", tag("b", "Why, and what was tried"), *said, class_="remarks"))
    parts += [_note(note, ids) for note in section.notes]
    parts.append(_from(section))
    return tag("section", *parts, id=section.id)


def _note(text: str, ids: Mapping[str, str]) -> Html:
    return tag("p", verdicts.linked(text, ids), class_="note")


def _shown(place: str, figure: Mapping[str, Any], ids: Mapping[str, str]) -> Html:
    """Return a figure with its heading and note, which paper keeps together."""
    over = " over ".join(label for label in (figure["y"]["label"], figure["x"]["label"]) if label)
    parts = [tag("h3", figure["title"]), _figure(f"{figure['title']}: {over}", data_figure=place)]
    if figure["note"]:
        parts.append(_note(figure["note"], ids))
    return tag("div", *parts, class_="shown")


def _figure(label: str, **attributes: str) -> Html:
    return tag("div", class_="figure", role="img", aria_label=label, **attributes)


def _claims(section: Section, ids: Mapping[str, str]) -> Iterator[Html]:
    """Return a list of them, for each network and data set that they are about."""
    places = {id(claim): verdicts.place_of(section.id, number) for number, claim in enumerate(section.claims)}
    name = "This project's own goals" if section.is_ours else "Claims"
    for network, claims in verdicts.by_network(section.claims).items():
        yield tag("h3", f"{name}: {network}" if network else name)
        yield tag("ul", *(_claim(claim, places[id(claim)], ids) for claim in claims), class_="claims")


def _claim(claim: Mapping[str, Any], place: str, ids: Mapping[str, str]) -> Html:
    seen = tag("span", verdicts.linked(str(claim.get("seen", "")), ids), class_="seen")
    text = tag("span", str(claim.get("text", "")), Html("<br>"), seen)
    return tag("li", verdicts.verdict(claim), text, id=place)


def _from(section: Section) -> Html:
    """Folded away: command, commit and machine, and all trainings by network."""
    origin = (each for key, value in section.origin.items() for each in (tag("dt", key), tag("dd", tag("code", value))))
    parts = [tag("summary", "Where this comes from"), tag("dl", *origin)]
    if section.trained:
        parts.append(tag("div", *map(_trained, section.trained), class_="tables"))
    return tag("details", *parts, class_="from")


def _trained(trained: Trained) -> Html:
    commands = (tag("li", f"{methods}: ", tag("code", command)) for command, methods in trained.commands.items())
    return tag("div", _table(trained.table, {}), tag("ul", *commands, class_="commands"))


def _table(table: Mapping[str, Any], ids: Mapping[str, str]) -> Html:
    """Columns of numbers stand to the right, and their numbers are not broken."""
    rows = [[str(cell) for cell in row] for row in table["rows"]]
    width = max(map(len, [table["columns"], *rows]))
    kinds = [
        {"class_": "number"} if place and _is_numeric([row[place] for row in rows if len(row) > place]) else {}
        for place in range(width)
    ]
    head = tag("tr", *(tag("th", str(name), **kind) for name, kind in zip(table["columns"], kinds, strict=False)))
    body = (tag("tr", *(tag("td", cell, **kind) for cell, kind in zip(row, kinds, strict=False))) for row in rows)
    title = str(table["title"])
    whole = tag("table", tag("caption", title), tag("thead", head), tag("tbody", *body))
    note = [_note(str(table["note"]), ids)] if table.get("note") else []
    # What is wider than a phone is scrolled, by keyboard too.
    return tag("div", tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=title), *note)


def _is_numeric(cells: Sequence[str]) -> bool:
    """Numbers, with what stands about them: signs, ranges, units."""
    return bool(cells) and all(re.match(r"[-+−±<>≤≥~]?\s?\d|–$|$", cell) for cell in cells)


def _explorer(number: int, network: Mapping[str, Any]) -> Html:
    last, slider = len(network["sizes"]) - 1, f"size-{number}"
    readings = (
        tag("div", tag("span", name, class_="name"), tag("span", "–", class_="value", data_reading=key))
        for key, name in READINGS.items()
    )
    choice = {"id": slider, "type": "range", "min": "0", "max": str(last), "value": str(last // 2), "step": "1"}
    charts = (
        _figure("accuracy over size, the chosen size marked"),
        _figure("rank of every layer at the chosen size"),
    )
    return tag(
        "div",
        tag("label", f"Choose a size: {network['title']}", for_=slider),
        tag("input", **choice),
        tag("div", *readings, class_="readings", aria_live="polite"),
        tag("div", *charts, class_="charts"),
        tag("p", SLICES, class_="note"),
        class_="explorer",
        data_explorer=str(number),
    )
