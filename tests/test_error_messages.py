"""Errors below the command line refer to options instead of quoting them, and say what to do.

A quoted `--memory 1GiB` would reach Python callers, who read `memory="1GiB"`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import prepcli
import trainer

# An option or a command of prep in backticks, or an override without them.
QUOTED = re.compile(r"`--[a-z]|`prep [a-z]|^--set ")
# These modules write for a terminal only: commands, their printed results, and pages about commands.
TERMINAL_MODULES = (
    "prepcli/commands/cli",
    "prepcli/commands/demo",
    "prepcli/commands/rendering",
    "prepcli/commands/testing",
    # What another trainer's setting is called here, a table that the pages for its users show too.
    "trainer/recipe/hints.py",
)
ERRORS = {"PrepError", "UsageError", "DamagedError", "OutputExistsError", "usage_error"}
# Errors of these modules need no hint: a user stopped a command without kept work, a step of the demo has a wrong
# result, and two checkpoints differ.
WITHOUT_HINT = {
    "prepcli/commands/cli/main.py",
    "prepcli/commands/demo/run.py",
    "prepcli/commands/rendering/inspection.py",
}


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each module by its path below the folder of the packages."""
    trees: dict[str, ast.Module] = {}
    for package in (prepcli, trainer):
        (folder,) = map(Path, package.__path__)
        for path in sorted(folder.rglob("*.py")):
            trees[path.relative_to(folder.parent).as_posix()] = ast.parse(path.read_text("utf-8"))
    return trees


def docstrings(tree: ast.Module) -> set[int]:
    """Return the identities of the nodes of docstrings."""
    nodes: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            nodes.add(id(node.value))
    return nodes


def quoted_strings(tree: ast.Module) -> Iterator[str]:
    """Yield the strings of a module that quote an option or a command."""
    excluded = docstrings(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in excluded:
            continue
        if isinstance(node.value, str) and QUOTED.search(node.value):
            yield node.value


def errors_without_hint(tree: ast.Module) -> Iterator[str]:
    """Yield the calls that make an error with a cause at most."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        # `*texts` and `**fields` may have a hint.
        names = {keyword.arg for keyword in node.keywords}
        has_hint = len(node.args) > 2 or bool(names & {"hint", None})
        is_splat = any(isinstance(argument, ast.Starred) for argument in node.args)
        if node.func.id in ERRORS and not has_hint and not is_splat:
            yield ast.unparse(node)


def test_no_string_quotes_an_option_or_a_command():
    found: list[str] = []
    for name, tree in modules().items():
        if not name.startswith(TERMINAL_MODULES):
            found += [f"{name}: {string}" for string in quoted_strings(tree)]
    assert found == []


def test_errors_have_a_hint():
    found: list[str] = []
    for name, tree in modules().items():
        if name not in WITHOUT_HINT:
            found += [f"{name}: {call}" for call in errors_without_hint(tree)]
    assert found == []
