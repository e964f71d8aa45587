"""Strings below the command line refer to options and commands instead of quoting them.

A quoted `--memory 1GiB` would reach Python callers, who read `memory="1GiB"`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import prepcli
import trainer

# An option or a command of prep in backticks, or an override without them.
QUOTED = re.compile(r"`--[a-z]|`prep [a-z]|^--set ")
# These modules write for a terminal only: commands, their printed results, and pages about commands.
TERMINAL_MODULES = (
    "prepcli/cli",
    "prepcli/demo",
    "prepcli/rendering",
    "prepcli/testing",
    "trainer/recipe/docs_page.py",
)


def docstrings(tree: ast.Module) -> set[int]:
    """Return the identities of the nodes of docstrings."""
    nodes: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            nodes.add(id(node.value))
    return nodes


def quoted_strings(path: Path) -> Iterator[str]:
    """Yield the strings of a module that quote an option or a command."""
    tree = ast.parse(path.read_text("utf-8"))
    excluded = docstrings(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in excluded:
            continue
        if isinstance(node.value, str) and QUOTED.search(node.value):
            yield node.value


def test_no_string_quotes_an_option_or_a_command():
    found: list[str] = []
    for package in (prepcli, trainer):
        (folder,) = map(Path, package.__path__)
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder.parent).as_posix()
            if not name.startswith(TERMINAL_MODULES):
                found += [f"{name}: {string}" for string in quoted_strings(path)]
    assert found == []
