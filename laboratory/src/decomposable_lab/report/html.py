"""Elements of a page: text inside is escaped, whatever it holds."""

from __future__ import annotations

from html import escape


class Html(str):
    """Mark text that is HTML already."""

    __slots__ = ()


def tag(name: str, *inside: str, **attributes: str) -> Html:
    """Return an element. A trailing underscore of an attribute is dropped, any other becomes a dash.

    >>> tag("p", "a < b", tag("b", "c"), class_="note", data_x='"1"')
    '<p class="note" data-x="&quot;1&quot;">a &lt; b<b>c</b></p>'
    """
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{given}>{joined(*inside)}</{name}>")


def joined(*parts: str) -> Html:
    """Return one after the other."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))
