"""Lists of names in messages: the first names, and the number of further ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

MAX_NAMES = 20


def join_names(
    names: Iterable[str],
    total: int | None = None,
    *,
    max_names: int = MAX_NAMES,
    separator: str = ", ",
) -> str:
    """Join the first names and count the remaining ones.

    Args:
        names: Names. At most `max_names` of them are read if `total` is set.
        total: Number of names, if `names` has no length or is incomplete.
        max_names: Number of names to show.
        separator: Separator of the names.

    Returns:
        For example `a, b and 3 more`.
    """
    if total is None:
        names = names if isinstance(names, list | tuple) else [*names]
        total = len(names)
    text = separator.join(itertools.islice(names, max_names))
    return f"{text} and {total - max_names:,} more" if total > max_names else text
