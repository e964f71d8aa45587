"""Which package may import which, read from the source, and the folders of the tests."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

import pytest

from tools.import_graph import COMMANDS, ROOTS, imported_names, module_paths, package_of, read_graph

FRAMEWORKS = {
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax",
    "tensorstore",
    "torch",
    "transformers",
    "safetensors",
}

# Lowest first: a package imports only packages above it in this list. So trainer imports prepcli without its commands,
# and of prepcli only the commands import trainer.
ORDER = (
    *(
        f"prepcli.{name}"
        for name in (
            *("core", "stores", "algebra", "planning", "engine", "models", "launch"),
            *("formats", "quantized", "sources", "restore", "targets", "execution"),
            "inspection",
        )
    ),
    *(
        f"trainer.{name}"
        for name in (
            *("distributed", "nn", "flax_modules", "recipe", "planning", "data"),
            *("generation", "training", "run"),
        )
    ),
    *(
        f"{COMMANDS}.{name}"
        for name in ("console", "pages", "operations", "testing", "demo", "rendering", "cli")
    ),
    "prepcli.__main__",
)
# Modules of `prepcli.planning`. A module imports only modules before it in this list.
PLANNING = ("plan", "slabs", "coverage")

PURE_PACKAGES = ("prepcli.algebra", "prepcli.models", "prepcli.planning")
# Libraries that turn values into text, without I/O.
PURE_LIBRARIES = {"yaml"}
PURE_MODULES = {
    *(
        f"prepcli.core.{name}"
        for name in (
            *("errors", "formatting", "json_values", "launchers", "option_spec"),
            "process_address",
        )
    ),
    "prepcli.formats.meta_llama_config",
    "prepcli.inspection.shard_map",
    "prepcli.sources.maps",
    "prepcli.sources.state_rows",
    "prepcli.sources.tensor_match",
}
# The modules of `prepcli.launch` that start processes.
STARTS_PROCESSES = {"prepcli.launch.local", "prepcli.launch.ray_worker"}
# Modules that start jax, or list its devices.
COMPUTES = {
    *(
        f"prepcli.commands.operations.{name}"
        for name in (
            "chat",
            "computing",
            "data",
            "evaluate",
            "generate",
            "generation_model",
            "harness_model",
            "model_outputs",
            "params",
            "plan",
            "train",
            "verify_logits",
        )
    ),
    # A plan of a recipe checks its data.
    "trainer.run.recipe_data",
    "prepcli.commands.operations.about",
    "prepcli.commands.testing",
    "prepcli.commands.testing.checks",
    "prepcli.commands.testing.tiny_model",
}

# The imports of a module are read when a test needs them, not when tests are collected.
MODULES = module_paths()


def reachable(module: str, *, without: Collection[str] = ()) -> set[str]:
    """Return all modules that importing `module` loads, not following imports of those in `without`."""
    reached: set[str] = set()
    queue = [module]
    while queue:
        new = read_graph().get(queue.pop(), set()) - reached - {*without}
        reached |= new
        queue += new
    return reached


def modules_in(package: str) -> list[str]:
    """Return all modules of a package."""
    return [module for module in MODULES if module == package or module.startswith(f"{package}.")]


PURE_MODULES |= {*modules_in("prepcli.launch")} - STARTS_PROCESSES
PURE = sorted(
    {*PURE_MODULES, *(module for package in PURE_PACKAGES for module in modules_in(package))}
)
CONVERTS = sorted({*modules_in("prepcli")} - COMPUTES)


def test_imported_names_include_function_bodies():
    text = "def f():\n    import jax.numpy as jnp\n    from orbax import checkpoint\n    if f:\n        import a.b\n"
    assert set(imported_names(text)) == {"jax.numpy", "orbax", "orbax.checkpoint", "a.b"}


def test_graph_covers_the_packages():
    assert {"prepcli.algebra.strided_copies", "prepcli.algebra.axis_map"} <= reachable(
        "prepcli.commands.operations.export"
    )
    assert "numpy" in read_graph()["prepcli.engine.files"]
    assert {*PURE_MODULES, *COMPUTES} <= set(MODULES)
    assert {f"prepcli.planning.{name}" for name in PLANNING} <= set(MODULES)
    assert {package_of(module) for module in MODULES} == {*ORDER, *ROOTS, COMMANDS}


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_only_packages_below_them(package: str):
    above = ORDER[ORDER.index(package) + 1 :]
    for module in modules_in(package):
        assert not [name for name in read_graph()[module] if package_of(name) in above], module


@pytest.mark.parametrize("number", range(len(PLANNING)))
def test_planning_imports_only_modules_below(number: int):
    above = {f"prepcli.planning.{name}" for name in PLANNING[number + 1 :]}
    assert not above & reachable(f"prepcli.planning.{PLANNING[number]}")


def test_pure_modules_import_only_the_standard_library():
    pure = (*PURE_PACKAGES, *PURE_MODULES, *PURE_LIBRARIES)
    for module in PURE:
        impure = [
            name
            for name in reachable(module)
            if name not in pure and package_of(name) not in PURE_PACKAGES
        ]
        assert not impure, module


def test_conversions_import_no_framework():
    for module in CONVERTS:
        assert not FRAMEWORKS & reachable(module, without=COMPUTES), module


def test_loading_parameters_imports_no_training_loop():
    unused = {"trainer.training.loop", "trainer.training.evaluation", "tokenizers"}
    for module in ("trainer.run.params",):
        reached = reachable(module)
        assert not unused & reached, module
        assert "trainer.generation" not in set(map(package_of, reached)), module


def test_modules_have_no_import_cycle():
    assert [module for module in MODULES if module in reachable(module)] == []


def test_formats_are_independent_of_models_and_plans():
    above = {"coverage", "plan", "slabs"}
    forbidden = {f"prepcli.planning.{name}" for name in above}
    forbidden |= {"prepcli.models.parameters", "prepcli.sources.tensor_match"}
    assert forbidden <= set(MODULES)
    for module in modules_in("prepcli.formats"):
        assert not forbidden & reachable(module), module


def test_steps_of_runs_are_independent_of_conversions():
    conversions = ("converter", "bucket_output", "object_writer", "workers")
    steps = ("checkpoint_manager", "training_storage", "training_folder", "training_bucket")
    for module in modules_in("prepcli.execution"):
        others = steps if module.endswith(conversions) else ()
        if module.endswith(steps):
            others = conversions
        reached = [name for name in reachable(module) if name.startswith("prepcli.execution.")]
        assert not [name for name in reached if name.endswith(others)], module


def test_engine_is_independent_of_models_and_formats():
    models = (
        "prepcli.formats",
        "prepcli.sources.tensor_match",
        "prepcli.models.families",
        "prepcli.models.parameters",
    )
    for module in modules_in("prepcli.engine"):
        assert not [name for name in reachable(module) if name.startswith(models)], module


PROCESS_QUERIES = {
    *("process_count", "process_index", "process_indices", "process_id", "num_processes"),
    *(
        "host_count",
        "host_id",
        "local_device_count",
        "local_devices",
        "addressable_devices",
        "is_initialized",
    ),
}
ENVIRONMENT = {"environ", "getenv"}
# Loading a recipe expands `${NAME}` in paths. A run reads the retries of requests and the variables of launchers.
READS_ENVIRONMENT = {
    "trainer.recipe.loading",
    *(f"trainer.run.{name}" for name in ("exports", "run", "storage")),
}
# Modules with settings under JAX's names, or with the devices of a mesh.
NAMES_PROCESSES = {
    "trainer.recipe.tables",
    *(f"trainer.run.{name}" for name in ("machine", "params")),
}


def attributes_used(text: str) -> set[str]:
    """Return every attribute that a module gets and every name that it imports from another."""
    nodes = list(ast.walk(ast.parse(text)))
    imports = [
        alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    return {*imports, *(node.attr for node in nodes if isinstance(node, ast.Attribute))}


def test_attributes_used_include_function_bodies():
    assert {"process_count", "environ"} <= attributes_used(
        "def f():\n    return jax.process_count(), os.environ\n"
    )
    assert "process_index" in attributes_used("from jax import process_index as index\n")


def test_only_trainer_distributed_queries_processes():
    for module in modules_in("trainer"):
        if package_of(module) == "trainer.distributed":
            continue
        used = attributes_used(MODULES[module].read_text())
        assert module in NAMES_PROCESSES or not PROCESS_QUERIES & used, module
        assert module in READS_ENVIRONMENT or not ENVIRONMENT & used, module
        launchers = "prepcli.core.launchers"
        assert module in NAMES_PROCESSES or launchers not in read_graph()[module], module


TESTS = Path(__file__).parent
FOLDERS = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path()}


@pytest.mark.parametrize("folder", sorted(FOLDERS), ids=str)
def test_folder_of_tests_mirrors_a_package(folder: Path):
    assert (TESTS.parent / folder / "__init__.py").is_file()
