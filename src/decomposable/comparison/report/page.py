"""Records → one HTML page with everything inside: text, figures, a slider, and the plotting library (plotly.js).

Nothing is loaded from anywhere. Text of records is escaped here, and set as text there (page.js).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from decomposable.comparison.exhibits.catalogue import EXHIBITS
from decomposable.comparison.report.finding import Found
from decomposable.comparison.report.html import Html, joined, tag
from decomposable.comparison.report.sections import Section, of_exhibit, of_run
from decomposable.errors import MissingExtraError
from decomposable.machine import timestamp
from decomposable.methods import METHODS

VERDICTS = {"holds": "holds", "partly": "holds in part", "fails": "does not hold", "not tried": "not tried"}
COUNTED = {"holds": "hold", "partly": "hold in part", "fails": "do not hold", "not tried": "not tried"}
SIGNS = {"holds": "✓", "partly": "~", "fails": "✗", "not tried": "–"}
READINGS = {"size": "part of the MACs", "accuracy": "accuracy", "macs": "MACs", "params": "parameters"}
LEAD = (
    "Every figure and table of Decomposable-Net: Scalable Low-Rank Compression for Neural Networks (IJCAI 2021), "
    "measured again, with a verdict on each of its claims at this scale, and what goes beyond it."
)
SLICES = (
    "One network, trained once: every position is a slice of the same file. Accuracy between measured sizes is "
    "interpolated; grey layers run dense."
)


def plotting_library() -> str:
    """The script of plotly.js, as its Python package has it."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError.of("plotly", "report") from error
    script: str = get_plotlyjs()
    return script


def page(found: Found, title: str) -> str:
    """The whole page."""
    sections = [*map(of_run, found.runs), *map(of_exhibit, found.exhibits)]
    explored = [section for section in sections if section.explorer is not None]
    places = {id(section): number for number, section in enumerate(explored)}
    content = {
        "sections": [{"figures": section.figures} for section in sections],
        "explorers": [section.explorer for section in explored],
        "colours": {name: method.style.color for name, method in METHODS.items() if method.style is not None},
    }
    parts = {
        "title": escape(title),
        "css": _resource("page.css"),
        "header": _header(found, title, sections),
        "sections": joined(*(_section(n, each, places.get(id(each))) for n, each in enumerate(sections))),
        "made": escape(timestamp()),
        "content": _embedded(content),
        "plotly": plotting_library().replace("</script", "<\\/script"),
        "js": _resource("page.js"),
    }
    return re.sub(r"@([a-z]+)@", lambda match: parts[match[1]], _resource("page.html"))


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _embedded(content: object) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _header(found: Found, title: str, sections: Sequence[Section]) -> Html:
    parts = [tag("h1", title)]
    if found.exhibits:
        verdicts = [claim.get("verdict") for section in sections for claim in section.claims]
        counts = (
            tag("li", tag("b", str(verdicts.count(key)), class_=_class(key)), text) for key, text in COUNTED.items()
        )
        parts += [
            tag("p", LEAD, class_="lead"),
            tag("ul", *counts, class_="counts", aria_label="claims by verdict"),
            tag("nav", _overview(found, sections), aria_label="exhibits"),
            *_failing(sections),
        ]
    if found.left_out:
        parts.append(tag("p", f"Left out, because they are no exhibits: {', '.join(found.left_out)}", class_="note"))
    return tag("header", *parts)


def _overview(found: Found, sections: Sequence[Section]) -> Html:
    """Every exhibit with a sign for each of its claims; those that were not measured, too."""
    rows = [
        tag(
            "li",
            tag("a", section.title, href=f"#{section.id}"),
            tag("span", *map(_mark, section.claims), class_="marks"),
        )
        for section in sections
    ]
    rows += [
        tag("li", f"{EXHIBITS[name].title} ({EXHIBITS[name].where})", tag("span", "not measured", class_="not-tried"))
        for name in found.missing
    ]
    return tag("ul", *rows, class_="overview")


def _failing(sections: Sequence[Section]) -> list[Html]:
    """In words, what does not hold, or in part: that is not to be searched for."""
    said = [
        tag(
            "li",
            tag("span", _said(claim), class_=f"verdict {_class(claim.get('verdict'))}"),
            " ",
            tag("a", str(claim.get("text", "")), href=f"#{section.id}"),
            *([" ", tag("span", str(claim["on"]), class_="on")] if claim.get("on") else []),
        )
        for verdict in ("fails", "partly")
        for section in sections
        for claim in section.claims
        if claim.get("verdict") == verdict
    ]
    if not said:
        return []
    return [
        tag(
            "details",
            tag("summary", f"What does not hold here, or in part ({len(said)})"),
            tag("ul", *said),
            class_="failing",
        )
    ]


def _mark(claim: Mapping[str, Any]) -> Html:
    sign = SIGNS.get(str(claim.get("verdict")), SIGNS["not tried"])
    said = " ".join(str(part) for part in (f"{_said(claim)}:", claim.get("text"), claim.get("on")) if part)
    return tag("span", sign, class_=f"mark {_class(claim.get('verdict'))}", title=said, role="img", aria_label=said)


def _said(claim: Mapping[str, Any]) -> str:
    return VERDICTS.get(str(claim.get("verdict")), "not tried")


def _class(verdict: Any) -> str:
    return str(verdict).replace(" ", "-") if verdict in VERDICTS else "not-tried"


def _section(number: int, section: Section, explorer: int | None) -> Html:
    """What there is to look at first, then what it says."""
    parts = [tag("h2", section.title), tag("p", section.where, class_="where")]
    if explorer is not None and section.explorer is not None:
        parts.append(_explorer(explorer, section.explorer))
    for place, figure in enumerate(section.figures):
        label = f"{figure['title']}: {figure['y']['label']} over {figure['x']['label']}"
        parts += [tag("h3", figure["title"]), _figure(label, data_figure=f"{number}/{place}")]
        if figure["note"]:
            parts.append(tag("p", figure["note"], class_="note"))
    if section.tables:
        parts.append(tag("div", *map(_table, section.tables), class_="tables"))
    parts += _claims(section.claims)
    if section.remarks:
        said = (tag("p", remark) for remark in section.remarks)
        parts.append(tag("div", tag("b", "Why, and what was tried"), *said, class_="remarks"))
    parts += [tag("p", note, class_="note") for note in section.notes]
    origin = (each for key, value in section.origin.items() for each in (tag("dt", key), tag("dd", tag("code", value))))
    runs = [] if section.runs is None else [_table(section.runs)]
    parts.append(tag("details", tag("summary", "Where this comes from"), tag("dl", *origin), *runs, class_="from"))
    return tag("section", *parts, id=section.id)


def _figure(label: str, **attributes: str) -> Html:
    return tag("div", class_="figure", role="img", aria_label=label, **attributes)


def _claims(claims: Sequence[Mapping[str, Any]]) -> Iterator[Html]:
    """A list of them, for each network and data set that they are about."""
    for network in dict.fromkeys(str(claim.get("on", "")) for claim in claims):
        of_network = [claim for claim in claims if str(claim.get("on", "")) == network]
        yield tag("h3", f"Claims: {network}" if network else "Claims")
        yield tag("ul", *map(_claim, of_network), class_="claims")


def _claim(claim: Mapping[str, Any]) -> Html:
    text = tag("span", str(claim.get("text", "")), Html("<br>"), tag("span", str(claim.get("seen", "")), class_="seen"))
    return tag("li", tag("span", _said(claim), class_=f"verdict {_class(claim.get('verdict'))}"), text)


def _table(table: Mapping[str, Any]) -> Html:
    head = tag("tr", *(tag("th", str(column)) for column in table["columns"]))
    rows = (tag("tr", *(tag("td", str(cell)) for cell in row)) for row in table["rows"])
    note = [tag("p", str(table["note"]), class_="note")] if table.get("note") else []
    whole = tag("table", tag("caption", str(table["title"])), tag("thead", head), tag("tbody", *rows))
    return tag("div", whole, *note, class_="scroll")


def _explorer(number: int, network: Mapping[str, Any]) -> Html:
    last, slider = len(network["sizes"]) - 1, f"size-{number}"
    readings = (
        tag("div", tag("span", name, class_="name"), tag("span", "–", class_="value", data_reading=key))
        for key, name in READINGS.items()
    )
    choice = {"id": slider, "type": "range", "min": "0", "max": str(last), "value": str(last // 2), "step": "1"}
    return tag(
        "div",
        tag("label", f"Choose a size: {network['title']}", for_=slider),
        tag("input", **choice),
        tag("div", *readings, class_="readings", aria_live="polite"),
        _figure("accuracy over size, the chosen size marked", style="height:260px"),
        _figure("rank of every layer at the chosen size", style="height:290px"),
        tag("p", SLICES, class_="note"),
        class_="explorer",
        data_explorer=str(number),
    )
