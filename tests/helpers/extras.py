"""Which modules an extra of the distribution installs, from the metadata of the installed packages."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# Roots of the project's own modules.
OWN_ROOTS = {"prepcli", "trainer", "tests", "bench", "tools"}
FALSE_AT_IMPORT = {"TYPE_CHECKING", "__name__ == '__main__'"}
OPTIONAL_IMPORT = re.compile(r"(?:lazy_module|importorskip)\(\s*\"(\w+)")


@cache
def distributions_of(name: str, extra: str) -> frozenset[str]:
    """Return the installed distributions that `pip install 'name[extra]'` requires, themselves included."""
    seen, pending = set[tuple[str, str]](), [(canonicalize_name(name), extra)]
    while pending:
        key = pending.pop()
        if key in seen:
            continue
        try:
            requirements = distribution(key[0]).requires or []
        except PackageNotFoundError:
            continue
        seen.add(key)
        for text in requirements:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": key[1]}):
                required = canonicalize_name(requirement.name)
                pending += [(required, part) for part in ("", *requirement.extras)]
    return frozenset(name for name, _ in seen)


@cache
def modules_of_test_extra() -> frozenset[str]:
    """Return the top-level modules that a test may import without the extra `parity`."""
    required = distributions_of("prepcli", "") | distributions_of("prepcli", "test")
    installed = {
        module
        for module, owners in packages_distributions().items()
        if required & {canonicalize_name(owner) for owner in owners}
    }
    return frozenset({*installed, *sys.stdlib_module_names, *OWN_ROOTS})


def imports_at_the_top(path: Path) -> set[str]:
    """Return the modules that a file imports when it is imported itself, outside of its functions."""
    names = set[str]()
    for node in _statements_at_import(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _statements_at_import(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, nested ones included."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in FALSE_AT_IMPORT:
            yield from _statements_at_import(node.orelse)
            continue
        yield node
        for block in ("body", "orelse", "finalbody"):
            yield from _statements_at_import(getattr(node, block, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements_at_import(handler.body)


@cache
def needs_parity(path: Path) -> bool:
    """Return whether a module of tests names an optional package that the extra `test` does not install."""
    packages = set(OPTIONAL_IMPORT.findall(path.read_text()))
    return not packages <= modules_of_test_extra()
