"""The collection of the tests imports no slow package: each worker of pytest collects all tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
SLOW_PACKAGES = {"torch", "transformers"}


def imported_packages(statement: ast.stmt) -> Iterator[str]:
    """Yield the packages that a statement of a module imports, also by `pytest.importorskip`."""
    for node in ast.walk(statement):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield alias.name.partition(".")[0]
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]
            case ast.Call(
                func=ast.Attribute(attr="importorskip"), args=[ast.Constant(str(name)), *_]
            ):
                yield name.partition(".")[0]


def slow_imports(path: Path) -> set[str]:
    """Return the slow packages that a module imports when it is imported itself."""
    packages = set[str]()
    for statement in ast.parse(path.read_text()).body:
        is_lazy = isinstance(statement, ast.FunctionDef | ast.ClassDef)
        if not is_lazy:
            packages.update(imported_packages(statement))
    return packages & SLOW_PACKAGES


def test_test_modules_import_slow_packages_lazily():
    """`tests.helpers.lazy_modules` imports them in the first test that uses them."""
    slow_modules = {}
    for path in TESTS.rglob("test_*.py"):
        if packages := slow_imports(path):
            slow_modules[str(path.relative_to(TESTS))] = packages
    assert slow_modules == {}
