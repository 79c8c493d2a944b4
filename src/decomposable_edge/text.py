"""Text that somebody else wrote, made fit to be shown."""

from __future__ import annotations


def printable(text: object) -> str:
    r"""Return the text as one line that a terminal shows and does not obey: escapes for what is not printable.

    Everything shown that came out of a file goes through here: a name in it could move the cursor, set the window's
    title, or begin a line of its own.

    >>> print(printable("layer 'a\nb\x1b[2J'"))
    layer 'a\nb\x1b[2J'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def first_line(error: BaseException, most: int = 200) -> str:
    r"""Return what an error of somebody else's code says first; where it says nothing, its class.

    >>> first_line(ValueError("one\ntwo")), first_line(ValueError())
    ('one', 'ValueError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0][:most]


def one_line(text: object, most: int = 400) -> str:
    r"""Return it as one printable line, cut off where it is long.

    >>> print(one_line("layer 'a\nb' is damaged", 15))
    layer 'a\nb' i…
    """
    shown = printable(str(text)[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"
