"""Patterns of tensor names, with `*` for any text. No I/O, no jax."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase


def matching_patterns(
    name: str, prefix: str, patterns: Iterable[str], *, wrapper: str = ""
) -> list[str]:
    """Return the patterns that match the whole name of a tensor, with or without the prefix of its family.

    A pattern may also begin with the prefix that a wrapper of the model gave to all names, e.g. `_orig_mod.`.

    >>> matching_patterns("model.layers.1.k_scale", "model.", ["layers.*.k_scale", "model.*", "k_scale"])
    ['layers.*.k_scale', 'model.*']
    """
    names = {wrapper + name, name, name.removeprefix(prefix)}
    return [pattern for pattern in patterns if any(fnmatchcase(each, pattern) for each in names)]


def pattern_of_layers(name: str) -> str:
    """Return a pattern that matches a tensor's name in every layer.

    >>> pattern_of_layers("model.layers.1.k_scale")
    'model.layers.*.k_scale'
    """
    return re.sub(r"\.\d+\.", ".*.", name)
