"""Imports of the commands: conversions import no jax, orbax or torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prepcli.cli.main import main
from tests.helpers.pickle_builder import make_torch_file
from tests.helpers.tiny_checkpoints import make_checkpoint

HEAVY_MODULES = ("jax", "jaxlib", "orbax", "tensorstore", "flax", "torch", "transformers", "safetensors")
SCRIPT = (
    "import sys; from prepcli.cli.main import main; code = main(sys.argv[2:]);"
    "loaded = [name for name in sys.argv[1].split(',') if name in sys.modules];"
    "sys.exit(code or (f'imported {loaded}' if loaded else 0))"
)
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


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_conversions_import_no_framework(folder: Path, words: list[str]):
    run = subprocess.run([sys.executable, "-c", SCRIPT, ",".join(HEAVY_MODULES), *words, "-q"],
                         cwd=folder, capture_output=True, text=True, check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_dry_run_imports_no_array_library(folder: Path):
    words = ["save-init", "./m", "--dry-run", "--out", "x", "-q"]
    run = subprocess.run([sys.executable, "-c", SCRIPT, ",".join((*HEAVY_MODULES, "tensorstore", "ml_dtypes")), *words],
                         cwd=folder, capture_output=True, text=True, check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr
