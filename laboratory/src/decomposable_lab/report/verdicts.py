"""What the page says of a claim: a word, a sign, and a row of signs for each network that it was tried on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from decomposable_lab.report.html import Html, joined, tag

VERDICTS = {"holds": "holds", "partly": "holds in part", "fails": "does not hold", "not tried": "not tried"}
COUNTED = {"holds": "hold", "partly": "hold in part", "fails": "do not hold", "not tried": "not tried"}
SIGNS = {"holds": "✓", "partly": "~", "fails": "✗", "not tried": "–"}
_MEANINGS = {
    "holds": "holds in every case that the claim speaks of",
    "partly": "in some of them",
    "fails": "in none",
    "not tried": "could not be tried here",
}
_HOW = (
    " Every claim is judged on each network by itself. Methods are equal where the ranges over their seeds overlap, "
    "and to be equal is not to be better; one run alone is given a range that grows with its errors. A sign leads to "
    "its claim, and to what was seen."
)

Claim = Mapping[str, Any]


def said(claim: Claim) -> str:
    """Return the verdict in words; an unknown one counts as not tried."""
    return VERDICTS.get(str(claim.get("verdict")), VERDICTS["not tried"])


def class_of(verdict: Any) -> str:
    """Return the class in the page's styles."""
    return str(verdict).replace(" ", "-") if verdict in VERDICTS else "not-tried"


def network_of(claim: Claim) -> str:
    """Return what it was tried on, where that is said."""
    return str(claim.get("on") or "")


def legend() -> Html:
    """Return what the signs mean."""
    each = (
        tag("span", tag("span", SIGNS[key], class_=f"mark {class_of(key)}"), f" {meaning}", class_="meaning")
        for key, meaning in _MEANINGS.items()
    )
    return tag("p", *each, _HOW, class_="legend")


def verdict(claim: Claim) -> Html:
    """Return the word for it."""
    return tag("span", said(claim), class_=f"verdict {class_of(claim.get('verdict'))}")


def marks(claims: Sequence[Claim], section: str) -> Html:
    """Return a sign for every claim of a section, by network; each leads to its claim."""
    places = {id(claim): f"#{place_of(section, number)}" for number, claim in enumerate(claims)}
    networks = by_network(claims)
    labels = _labels(networks)
    groups = (
        tag(
            "span",
            *([tag("span", labels[network], class_="network")] if labels[network] else []),
            *(_mark(claim, places[id(claim)]) for claim in of_network),
            class_="group",
        )
        for network, of_network in networks.items()
    )
    return tag("span", *groups, class_="marks")


def place_of(section: str, number: int) -> str:
    """Return the name of a claim in the page's address."""
    return f"{section}-claim-{number + 1}"


def by_network(claims: Iterable[Claim]) -> dict[str, list[Claim]]:
    """Return those about each network, in the order of the first."""
    found: dict[str, list[Claim]] = {}
    for claim in claims:
        found.setdefault(network_of(claim), []).append(claim)
    return found


def _labels(networks: Iterable[str]) -> dict[str, str]:
    """Short names: the data alone, where that tells them apart."""
    short = {name: match[1] if (match := re.search(r" on ([^,]+)", name)) else name for name in networks}
    return short if len(set(short.values())) == len(short) else {name: name for name in short}


def _mark(claim: Claim, place: str) -> Html:
    sign = SIGNS.get(str(claim.get("verdict")), SIGNS["not tried"])
    network = f" ({network_of(claim)})" if network_of(claim) else ""
    words = f"{said(claim)}: {claim.get('text', '')}{network}"
    return tag("a", sign, class_=f"mark {class_of(claim.get('verdict'))}", title=words, aria_label=words, href=place)


def linked(text: str, ids: Mapping[str, str]) -> Html:
    """Write text with links to the exhibits that it names in brackets, or after "see".

    >>> linked("better (3c), see 2a & 9z", {"3c": "exhibit-3c", "2a": "exhibit-2a"})
    'better (<a href="#exhibit-3c">3c</a>), see <a href="#exhibit-2a">2a</a> &amp; 9z'
    """
    if not ids:
        return joined(text)
    names = "|".join(re.escape(name) for name in sorted(ids, key=len, reverse=True))
    parts = re.split(rf"((?<=\()(?:{names})(?=[);,])|(?<=\bsee )(?:{names})(?![\w-]))", text)
    # Of what is split by a group, every second part is what the group found.
    return joined(*(tag("a", part, href=f"#{ids[part]}") if place % 2 else part for place, part in enumerate(parts)))
