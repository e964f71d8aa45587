"""Patterns of leaves in a recipe: a path, or `re:` and a regular expression.

A path selects the leaf and all leaves below it. Paths have no layer numbers, so that
patterns do not depend on whether layers are stacked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from prepcli.core.errors import Command, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.models.rules import LEAF_PREFIX, path_without_layers

# Keys of the recipe's `[optimizer]`.
PATTERN_KEYS = ("freeze", "decay_exclude", "decay_include")
FREEZE_KEY = "optimizer.freeze"


def matches_any(patterns: Iterable[str], path: str) -> bool:
    """Return whether one of the patterns matches the dotted path of a leaf."""
    return any(_pattern_matches(pattern, path_without_layers(path)) for pattern in patterns)


def _pattern_matches(pattern: str, path: str) -> bool:
    """Return whether a pattern is the path or the start of it, or an expression for it."""
    if pattern.startswith(LEAF_PREFIX):
        return re.search(pattern.removeprefix(LEAF_PREFIX), path) is not None
    return path == pattern or path.startswith(f"{pattern}.")


def check_regular_expressions(patterns: Iterable[str], key: str) -> None:
    """Check the regular expressions of patterns.

    Args:
        patterns: The patterns.
        key: Their recipe key, for messages.

    Raises:
        UsageError: An expression is invalid.
    """
    for pattern in patterns:
        if pattern.startswith(LEAF_PREFIX):
            try:
                re.compile(pattern.removeprefix(LEAF_PREFIX))
            except re.error as error:
                hint = (
                    f"`{LEAF_PREFIX}` and a regular expression, or a path without `{LEAF_PREFIX}`"
                )
                raise usage_error(
                    f"`{key}` has the invalid pattern `{pattern}`", str(error), hint
                ) from error


def check_used(patterns: Iterable[str], paths: Mapping[str, object], key: str) -> None:
    """Check that each pattern matches a leaf.

    Args:
        patterns: The patterns.
        paths: Parameters by path.
        key: The recipe key of the patterns, for messages.

    Raises:
        UsageError: A pattern matches no leaf.
    """
    known = list(dict.fromkeys(map(path_without_layers, paths)))
    for pattern in patterns:
        if not any(_pattern_matches(pattern, path) for path in known):
            hint = did_you_mean(pattern.removeprefix(LEAF_PREFIX), known) or text(
                "{} lists the leaves", Command("inspect", "CHECKPOINT")
            )
            raise usage_error(
                f"`{pattern}` of `{key}` matches no leaf", f"the first leaf is {known[0]}", hint
            )
