"""Imports of the commands: conversions import no jax, orbax or torch, and no readers of other formats."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from tests.helpers.pickle_builder import make_torch_file
from tests.helpers.tiny_checkpoints import make_checkpoint

HEAVY_MODULES = (
    "jax",
    "jaxlib",
    "orbax",
    "tensorstore",
    "flax",
    "torch",
    "transformers",
    "safetensors",
)
# Modules of features that a conversion of safetensors without a lock does not use.
UNUSED_MODULES = (
    "prepcli.formats.lock_file",
    "trainer.recipe",
    "prepcli.models.families.llama",
    "prepcli.sources.openers.gguf_file",
    "prepcli.sources.openers.meta_folder",
    "prepcli.commands.pages.report_page",
)
SCRIPT = """
import json, sys
from prepcli.commands.cli.main import main
modules, commands = map(json.loads, sys.argv[1:])
for words in commands:
    if code := main(words):
        sys.exit(code)
    if loaded := [name for name in modules if name in sys.modules]:
        sys.exit(f"{words} imported {loaded}")
"""
COMMANDS = [
    ["pad-vocab", "./m", "--init", "mean"],
    ["save-init", "./m", "--mesh", "1,2,4", "--pad-vocab", "auto"],
    ["reshard", "init", "--mesh", "1,4,1", "--out", "again"],
    ["export", "init"],
    ["export", "init", "--layout", "hf-flax", "--out", "flax"],
    ["verify", "init", "./m"],
    ["inspect", "init", "--stats"],
    ["save-init", "./of-torch", "--out", "from-torch"],
    ["inspect", "./of-torch"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("light")
    tensors = make_checkpoint(path / "m")
    (path / "of-torch").mkdir()
    (path / "of-torch/config.json").write_bytes((path / "m/config.json").read_bytes())
    (path / "of-torch/pytorch_model.bin").write_bytes(make_torch_file(tensors))
    assert main(["save-init", str(path / "m"), "--out", str(path / "init"), "-q"]) == 0
    return path


def check_imports(folder: Path, modules: Sequence[str], commands: Sequence[Sequence[str]]) -> None:
    """Run commands in one new process, and check after each that none of the modules was imported."""
    arguments = [json.dumps(modules), json.dumps([[*words, "-q"] for words in commands])]
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], cwd=folder, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


def test_conversions_import_no_framework(folder: Path):
    check_imports(folder, HEAVY_MODULES, COMMANDS)


def test_conversion_imports_no_unused_feature(folder: Path):
    check_imports(folder, UNUSED_MODULES, [["save-init", "./m", "--out", "unused-features"]])


def test_commands_on_an_item_import_no_recipe(folder: Path):
    """The models of recipe tables take 0.3 s to build. Only the export of a training state reads a recipe."""
    commands = [
        ["inspect", "init"],
        ["verify", "init"],
        ["reshard", "init", "--mesh", "1,2,1", "--out", "no-recipe"],
        ["export", "init", "--out", "no-recipe-hf"],
    ]
    check_imports(folder, ["trainer.recipe"], commands)


def test_dry_run_imports_no_array_library(folder: Path):
    check_imports(
        folder, (*HEAVY_MODULES, "ml_dtypes"), [["save-init", "./m", "--dry-run", "--out", "x"]]
    )
