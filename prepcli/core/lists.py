"""Lists of names in messages: the first names, and the number of further ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

MAX_NAMES = 20
# Eight lines of a terminal with 80 columns. With what failed and a hint, a message has about ten lines.
MAX_CHARS = 640


def join_names(
    names: Iterable[str],
    total: int | None = None,
    *,
    max_names: int = MAX_NAMES,
    max_chars: int = MAX_CHARS,
    separator: str = ", ",
) -> str:
    """Join the first names and count the remaining ones.

    Args:
        names: Names. At most `max_names` of them are read if `total` is set.
        total: Number of names, if `names` has no length or is incomplete.
        max_names: Number of names to show.
        max_chars: Number of characters of the shown names. The first name is always shown.
        separator: Separator of the names.

    Returns:
        For example `a, b and 3 more`.
    """
    if total is None:
        if not isinstance(names, list | tuple):
            names = [*names]
        total = len(names)
    shown: list[str] = []
    num_chars = 0
    for name in itertools.islice(names, max_names):
        num_chars += len(name) + len(separator)
        if shown and num_chars > max_chars:
            break
        shown.append(name)
    text = separator.join(shown)
    if total > len(shown):
        return f"{text} and {total - len(shown):,} more"
    return text
