"""Lists in messages: the first names, and how many more there are. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

MAX_NAMES = 20


def join_names(
    names: Iterable[str], total: int | None = None, max_names: int = MAX_NAMES, separator: str = ", "
) -> str:
    """Join the first names and count the rest.

    Args:
        names: Names; no more than `most` of them are taken.
        total: How many names there are, where `names` is not all of them or has no length.
        most: How many to show.
        separator: Between names.
    """
    if total is None:
        names = names if isinstance(names, list | tuple) else [*names]
        total = len(names)
    text = separator.join(itertools.islice(names, max_names))
    return f"{text} and {total - max_names:,} more" if total > max_names else text
