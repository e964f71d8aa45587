"""Escape control characters: names from untrusted files must not control a terminal or break a page."""

from __future__ import annotations

import re
from unicodedata import category

# Newline, tab, and the zero-width joiners of letters.
UNESCAPED = "\n\t\u200c\u200d"

# Marks around a part of a text. `escape_marks` escapes them in the text itself.
MARK_START = "⟦"
MARK_END = "⟧"

_UNUSUAL = re.compile(r"[^ -~\n\t]")  # only these characters are inspected one by one


def printable(text: str) -> str:
    """Return a text of one or more lines with control characters escaped.

    Spaces and joiners of other scripts are kept.
    """
    return _UNUSUAL.sub(lambda match: _escape_char(match[0]), text)


def printable_line(text: str) -> str:
    """Return a text as one line, with line breaks and tabs escaped, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def marked(text: str) -> str:
    """Return a text with marks around it."""
    return f"{MARK_START}{text}{MARK_END}"


def escape_marks(text: str) -> str:
    """Return a text with its brackets escaped that look like marks."""
    for mark in (MARK_START, MARK_END):
        text = text.replace(mark, ascii(mark)[1:-1])
    return text


def _escape_char(char: str) -> str:
    # `isprintable` is false for all spaces but U+0020. Those of category Zs, e.g. the no-break space,
    # only move the text, and no control character is among them.
    if char.isprintable() or char in UNESCAPED or category(char) == "Zs":
        return char
    return ascii(char)[1:-1]
