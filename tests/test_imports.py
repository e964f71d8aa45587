"""Who may import whom, read from the source: imports inside functions count as well."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("prepcli", "trainer")
FRAMEWORKS = {"jax", "jaxlib", "flax", "optax", "orbax", "tensorstore", "torch", "transformers", "safetensors"}
PURE = [
    "prepcli.formats.meta_params",
    "prepcli.lists",
    "prepcli.shard_map",
    *sorted(f"prepcli.planning.{path.stem}" for path in (ROOT / "prepcli" / "planning").glob("[!_]*.py")),
    "trainer.axes",
    "trainer.families",
    "trainer.gpt_like",
    "trainer.host_reads",
    "trainer.layouts",
    "trainer.llama_like",
    "trainer.memory_estimate",
    "trainer.mesh",
    "trainer.parts",
    "trainer.rope",
    "trainer.table",
    "trainer.traits",
    "trainer.tree",
    "trainer.unsupported",
]
UPWARDS = ["planning", "engine", "formats", "reading", "writing", "commands", "app"]  # each on those before
ALGEBRA = ["boxes", "grids", "moves", "plan", "slabs", "coverage"]  # so are these, within planning
# lists the devices that jax sees, if it is asked to; train, and generate
NO_CONVERSION = {
    *(f"prepcli.commands.{name}" for name in ("env", "train", "generate")),
    "prepcli.training_checks",
    "prepcli.training_lines",
}


def imported(text: str) -> Iterator[str]:
    """Every module that a source imports, and every name that it takes from one, which may be a module too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_graph() -> dict[str, set[str]]:
    """Module -> modules of ours and first names of others that it imports."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    graph = {}
    for name, path in names.items():
        found = set(imported(path.read_text()))
        others = {each.partition(".")[0] for each in found} - {*PACKAGES, *sys.stdlib_module_names}
        graph[name] = {each for each in found if each in names} - {*PACKAGES, name} | others
    return graph


GRAPH = read_graph()


def reached(name: str, apart_from: Collection[str] = ()) -> set[str]:
    """All that comes with a module, apart from what one of them brings."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = GRAPH.get(waiting.pop(), set()) - found - {*apart_from}
        found |= new
        waiting += new
    return found


def test_imports_within_functions_are_seen():
    text = "def f():\n    import jax.numpy as jnp\n    from orbax import checkpoint\n    if f:\n        import a.b\n"
    assert set(imported(text)) == {"jax.numpy", "orbax", "orbax.checkpoint", "a.b"}


def test_the_graph_is_that_of_the_packages():
    assert {"prepcli.planning.moves", "trainer.axes", "prepcli.planning.boxes"} <= reached("prepcli.commands.export")
    assert "numpy" in GRAPH["prepcli.engine.files"]
    assert {*PURE, *NO_CONVERSION} <= set(GRAPH)


@pytest.mark.parametrize("name", sorted(name for name in GRAPH if name.startswith("trainer")))
def test_the_trainer_knows_nothing_of_prep(name: str):
    assert not [other for other in reached(name) if other.startswith("prepcli")]


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_the_standard_library_and_one_another(name: str):
    families = {other for other in GRAPH if other.startswith("trainer.families.")}
    assert reached(name) <= {*PURE, *families, "prepcli.planning", "prepcli.errors", "prepcli.units", "trainer.errors"}


@pytest.mark.parametrize("name", sorted({n for n in GRAPH if n.startswith("prepcli")} - NO_CONVERSION))
def test_no_conversion_comes_near_a_framework(name: str):
    assert not FRAMEWORKS & reached(name, NO_CONVERSION)


def test_nothing_imports_itself_by_a_detour():
    assert [name for name in GRAPH if name in reached(name)] == []


@pytest.mark.parametrize("order", [[f"prepcli.{name}" for name in UPWARDS], [f"prepcli.planning.{n}" for n in ALGEBRA]])
def test_what_is_below_does_not_import_what_is_above(order: list[str]):
    for number, name in enumerate(order):
        inside = [each for each in GRAPH if each == name or each.startswith(f"{name}.")]
        assert inside
        for each in inside:
            assert not [other for other in reached(each) if other.startswith(tuple(order[number + 1 :]))], each


def test_formats_know_neither_models_nor_commands():
    above = {
        "prepcli.planning.accounting",
        "prepcli.writing.convert",
        "prepcli.engine.pipeline",
        "prepcli.planning.moves",
        "prepcli.planning.plan",
        "trainer.table",
    }
    for name in (name for name in GRAPH if name.startswith("prepcli.formats.")):
        assert not above & reached(name), name


@pytest.mark.parametrize("name", sorted(name for name in GRAPH if name.startswith("prepcli.engine.")))
def test_the_engine_knows_neither_models_nor_formats(name: str):
    models = ("prepcli.formats", "prepcli.planning.accounting", "trainer.families", "trainer.table")
    assert not [other for other in reached(name) if other.startswith(models)]


def test_only_the_command_line_imports_commands():
    users = {name for name in GRAPH for other in GRAPH[name] if other.startswith("prepcli.commands.")}
    outside = {name for name in users if not name.startswith("prepcli.commands.")}
    assert outside <= {"prepcli.app.converting", "prepcli.app.looking", "prepcli.app.training"}
