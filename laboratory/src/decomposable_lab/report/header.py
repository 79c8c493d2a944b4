"""The head of the page: in one glance which claims hold, which do not, and which could not be tried."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from decomposable_lab.exhibits.catalogue import EXHIBITS
from decomposable_lab.report import verdicts
from decomposable_lab.report.finding import Found
from decomposable_lab.report.html import Html, tag
from decomposable_lab.report.sections import Section

LEAD = (
    "Figures, tables and statements of Decomposable-Net: Scalable Low-Rank Compression for Neural Networks (IJCAI "
    "2021), measured again, with a verdict on what the paper says of each, at this scale; and what goes beyond it."
)
WORST_FIRST = ("fails", "partly")


def header(found: Found, title: str, sections: Sequence[Section]) -> Html:
    """Write title, counts, what the signs mean, and every exhibit with a sign for each of its claims."""
    parts = [tag("h1", title)]
    if found.exhibits:
        parts += [
            tag("p", LEAD, class_="lead"),
            *_counts("The paper's claims", [each for each in sections if not each.is_ours], "counts"),
            *_counts("This project's own goals", [each for each in sections if each.is_ours], "counts small"),
            verdicts.legend(),
            tag("nav", _overview(found, sections), aria_label="exhibits"),
            *_failing(sections),
        ]
    if found.left_out:
        parts.append(tag("p", f"Left out, because they are no exhibits: {', '.join(found.left_out)}", class_="note"))
    return tag("header", *parts)


def _counts(name: str, sections: Sequence[Section], class_: str) -> list[Html]:
    """Return how many claims have each verdict."""
    found = [verdicts.class_of(claim.get("verdict")) for section in sections for claim in section.claims]
    if not found:
        return []
    each = (
        tag("li", tag("b", str(found.count(verdicts.class_of(key))), class_=verdicts.class_of(key)), text)
        for key, text in verdicts.COUNTED.items()
    )
    return [tag("div", tag("span", name, class_="of"), tag("ul", *each, aria_label=name), class_=class_)]


def _overview(found: Found, sections: Iterable[Section]) -> Html:
    """Return every exhibit; those that were not measured, too."""
    rows = [
        tag(
            "li",
            tag("span", _name(section.name), tag("a", section.title, href=f"#{section.id}")),
            verdicts.marks(section.claims, section.id),
        )
        for section in sections
    ]
    rows += [
        tag(
            "li",
            tag("span", _name(EXHIBITS[name].where), EXHIBITS[name].title),
            tag("span", "not measured", class_="not-tried"),
        )
        for name in found.missing
    ]
    return tag("ul", *rows, class_="overview")


def _name(text: str) -> Html:
    return tag("span", text, " ", class_="name")


def _failing(sections: Sequence[Section]) -> list[Html]:
    """In words, what does not hold, or in part: that is not to be searched for. The paper's claims come first."""
    paper, ours = (_worst(section for section in sections if section.is_ours is is_ours) for is_ours in (False, True))
    if not paper and not ours:
        return []
    parts = [tag("summary", f"What does not hold here, or in part ({len(paper) + len(ours)})")]
    for heading, said in (("Of the paper's claims", paper), ("Of this project's own goals", ours)):
        if said:
            parts += [tag("h3", f"{heading} ({len(said)})"), tag("ul", *said)]
    return [tag("details", *parts, class_="failing")]


def _worst(sections: Iterable[Section]) -> list[Html]:
    claims = [(section, number, claim) for section in sections for number, claim in enumerate(section.claims)]
    return [
        _line(claim, verdicts.place_of(section.id, number))
        for verdict in WORST_FIRST
        for section, number, claim in claims
        if claim.get("verdict") == verdict
    ]


def _line(claim: Mapping[str, Any], place: str) -> Html:
    network = verdicts.network_of(claim)
    return tag(
        "li",
        verdicts.verdict(claim),
        " ",
        tag("a", str(claim.get("text", "")), href=f"#{place}"),
        *([" ", tag("span", network, class_="on")] if network else []),
    )
