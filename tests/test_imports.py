"""Which package may import which, read from the source. Imports inside functions count."""

from __future__ import annotations

import ast
from collections.abc import Collection

import pytest

from tools.import_graph import ROOTS, imported_names, module_paths, package_of, read_graph

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

# Lowest first: a package imports only from packages above it in its list.
TRAINER = (
    *(
        "models",
        "files",
        "tables",
        "distributed",
        "nn",
        "flax_modules",
        "recipe",
        "planning",
        "data",
    ),
    *("generation", "training"),
)
PREPCLI = (
    *(
        "errors",
        "option_spec",
        "console",
        "planning",
        "engine",
        "formats",
        "quantized",
        "remote",
        "sources",
        "restore",
        "targets",
    ),
    *(
        "execution",
        "inspection",
        "training_runs",
        "pages",
        "demo",
        "launch",
        "operations",
        "testing",
        "rendering",
        "cli",
        "__main__",
    ),
)
ORDER = (*(f"trainer.{name}" for name in TRAINER), *(f"prepcli.{name}" for name in PREPCLI))
# Modules of `prepcli.planning`. A module imports only modules before it in this list.
PLANNING = ("grids", "strided_copies", "plan", "slabs", "coverage")

PURE_PACKAGES = ("trainer.models", "prepcli.planning")
# Libraries that turn values into text, without I/O.
PURE_LIBRARIES = {"yaml"}
# The checkpoint protocols exchange NumPy arrays.
USES_NUMPY = {"trainer.models.checkpoint_store"}
PURE_MODULES = {
    "prepcli.console.formatting",
    "prepcli.console.lists",
    "prepcli.errors",
    "prepcli.formats.meta_llama_config",
    "prepcli.inspection.shard_map",
    "prepcli.option_spec",
    "trainer.files.json_values",
    *(
        f"prepcli.launch.{name}"
        for name in (
            "job",
            "options",
            "shell",
            "ray",
            "sky",
            "sky_machines",
            "slurm",
            "tpu",
            "command",
            "gke",
            "hardware",
            "tpu_topologies",
        )
    ),
}
# Modules that start jax, or list its devices.
COMPUTES = {
    *(
        f"prepcli.training_runs.{name}"
        for name in (
            *("checks", "continued_state", "environment", "export", "metrics", "observe"),
            *("params", "prepare", "processes", "random_params", "recipe_data", "remote_data"),
            *("run", "start", "stops", "storage", "summary", "train", "verbatim_params"),
        )
    ),
    *(
        f"prepcli.operations.{name}"
        for name in (
            "batches",
            "chat",
            "compute_together",
            "evaluate",
            "evaluation_model",
            "flax_models",
            "generate",
            "generation_model",
            "harness_model",
            "load_params",
            "model_files",
            "model_outputs",
            "open_params",
            "prompts",
            "save_params",
            "target_metrics",
            "token_stream",
            "tokenize",
            "train",
            "verify_logits",
        )
    ),
    "prepcli.operations.env",
    "prepcli.operations.plan_compile",
    "prepcli.testing",
    *(
        f"prepcli.testing.{name}"
        for name in (
            "checks",
            "greedy",
            "kit",
            "report",
            "subject",
            "tiny_transformers",
            "torch_transformers",
        )
    ),
}

# Modules of a package that may import jax, without jax themselves: the package and a protocol.
PROTOCOLS = {"trainer.distributed", "trainer.distributed.process_group"}

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


PURE = sorted(
    {*PURE_MODULES, *(module for package in PURE_PACKAGES for module in modules_in(package))}
    - USES_NUMPY
)


CONVERTS = sorted({*modules_in("prepcli")} - COMPUTES)


def test_imported_names_include_function_bodies():
    text = "def f():\n    import jax.numpy as jnp\n    from orbax import checkpoint\n    if f:\n        import a.b\n"
    assert set(imported_names(text)) == {"jax.numpy", "orbax", "orbax.checkpoint", "a.b"}


def test_graph_covers_the_packages():
    assert {"prepcli.planning.strided_copies", "trainer.models.axis_map"} <= reachable(
        "prepcli.operations.export"
    )
    assert "numpy" in read_graph()["prepcli.engine.files"]
    assert {*PURE_MODULES, *COMPUTES} <= set(MODULES)
    assert {f"prepcli.planning.{name}" for name in PLANNING} <= set(MODULES)
    assert {package_of(module) for module in MODULES} == {*ORDER, *ROOTS}


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_only_packages_below_them(package: str):
    above = ORDER[ORDER.index(package) + 1 :]
    for module in modules_in(package):
        assert not [name for name in read_graph()[module] if package_of(name) in above], module


@pytest.mark.parametrize("number", range(len(PLANNING)))
def test_planning_imports_only_modules_below(number: int):
    above = {f"prepcli.planning.{name}" for name in PLANNING[number + 1 :]}
    assert not above & reachable(f"prepcli.planning.{PLANNING[number]}")


def test_trainer_does_not_import_prepcli():
    for module in modules_in("trainer"):
        assert not [name for name in reachable(module) if name.startswith("prepcli")], module


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


def test_conversions_import_only_models_and_recipes():
    allowed = {f"trainer.{name}" for name in ("models", "files", "recipe", "planning", "training")}
    for module in CONVERTS:
        reached = reachable(module, without=COMPUTES) - PROTOCOLS
        used = {package_of(name) for name in reached if name.startswith("trainer.")}
        assert used <= allowed, module


def test_loading_parameters_imports_no_training_loop():
    unused = {"trainer.training.loop", "trainer.training.evaluation", "tokenizers"}
    for module in ("prepcli.training_runs.params", "prepcli.training_runs.random_params"):
        reached = reachable(module)
        assert not unused & reached, module
        assert "trainer.generation" not in set(map(package_of, reached)), module


def test_modules_have_no_import_cycle():
    assert [module for module in MODULES if module in reachable(module)] == []


def test_formats_are_independent_of_models_and_plans():
    above = {"tensor_match", "coverage", "strided_copies", "plan", "slabs"}
    forbidden = {f"prepcli.planning.{name}" for name in above} | {"trainer.models.parameters"}
    assert forbidden <= set(MODULES)
    for module in modules_in("prepcli.formats"):
        assert not forbidden & reachable(module), module


def test_engine_is_independent_of_models_and_formats():
    models = (
        "prepcli.formats",
        "prepcli.planning.tensor_match",
        "trainer.models.families",
        "trainer.models.parameters",
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
# Loading a recipe expands `${NAME}` in paths.
READS_ENVIRONMENT = {"trainer.recipe.loading"}
# Modules with settings under JAX's names, or with the variables of launchers.
NAMES_PROCESSES = {
    *(f"trainer.models.{name}" for name in ("coordinator_address", "launchers", "process_address")),
    "trainer.recipe.run_tables",
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
        launchers = "trainer.models.launchers"
        assert module in NAMES_PROCESSES or launchers not in read_graph()[module], module
