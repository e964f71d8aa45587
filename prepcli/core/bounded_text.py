"""Length limits of messages: values and names in them come from users and from untrusted files."""

from __future__ import annotations

import re

from prepcli.core.counts import count_text
from prepcli.core.errors import PrepError

# Longer than most paths. A longer word is a value from an option or a file.
MAX_WORD_CHARS = 240
SHORT_WORD_CHARS = 100
MAX_WHAT_CHARS = 400
# The list of the keys of a recipe's table is shorter.
MAX_LINE_CHARS = 800
# The rows of a terminal of the usual size.
MAX_LINES = 24
# A hint may be a command to copy, with the paths of the user.
MAX_HINT_CHARS = 2000

_LONG_WORD = re.compile(rf"\S{{{MAX_WORD_CHARS + 1},}}")


def bounded_error(error: PrepError) -> PrepError:
    """Return an error with a short message, for values of any length.

    The middle of long words and lines is replaced by an ellipsis. A hint keeps its words, because it may be a command
    to copy.
    """
    return error.with_texts(
        what=shorten(bounded_line(error.what), MAX_WHAT_CHARS),
        why=bounded_lines(error.why),
        hint=shorten(error.hint, MAX_HINT_CHARS),
    )


def bounded_lines(text: str) -> str:
    """Return a text with at most MAX_LINES lines and the number of omitted ones."""
    lines = text.split("\n")
    shown = [bounded_line(line) for line in lines[:MAX_LINES]]
    if len(lines) > MAX_LINES:
        shown.append(f"and {count_text(len(lines) - MAX_LINES, 'more line')}")
    return "\n".join(shown)


def bounded_line(text: str) -> str:
    """Return a line with the middle of its long words replaced by an ellipsis, and then its own middle."""
    words_shortened = _LONG_WORD.sub(lambda match: shorten(match[0], SHORT_WORD_CHARS), text)
    return shorten(words_shortened, MAX_LINE_CHARS)


def shorten(text: str, width: int) -> str:
    """Shorten a text to `width` with an ellipsis in its middle. The ends identify a name."""
    if len(text) <= width:
        return text
    # Width 9 is 4 + 1 + 4 characters: `abcdefghijkl` becomes `abcd…ijkl`.
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"
