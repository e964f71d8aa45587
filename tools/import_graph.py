"""Imports between the modules of the project, read from the source. Imports inside functions count."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOTS = ("prepcli", "trainer")
COMMANDS = "prepcli.commands"  # a package of packages


def imported_names(text: str) -> Iterator[str]:
    """Yield every imported module, and every imported name qualified by its module (it may be a module too)."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_paths() -> dict[str, Path]:
    """Return the file of each module of the project."""
    paths = [path for root in ROOTS for path in (ROOT / root).rglob("*.py")]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }


@cache
def read_graph() -> Mapping[str, set[str]]:
    """Return, per module, the project's modules and the top-level names of third-party packages that it imports."""
    modules, graph = module_paths(), dict[str, set[str]]()
    for module, path in modules.items():
        names = set(imported_names(path.read_text()))
        third_party = {name.partition(".")[0] for name in names} - {
            *ROOTS,
            *sys.stdlib_module_names,
        }
        graph[module] = {name for name in names if name in modules} - {*ROOTS, module} | third_party
    return graph


def package_of(module: str) -> str:
    """Return the package of a module: two components of its name, and three inside of `prepcli.commands`."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[:2] == COMMANDS.split(".") else 2])


def package_graph(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return, per package of the project, the other packages that its modules import.

    Modules directly in `prepcli` are left out: the lazy exports and the entry point.
    """
    packages = {package_of(module) for module in graph if module.count(".") > 1}
    imports: dict[str, set[str]] = {package: set() for package in sorted(packages)}
    for module, names in graph.items():
        if package_of(module) in packages:
            imports[package_of(module)] |= {package_of(name) for name in names} & packages - {
                package_of(module)
            }
    return imports
