"""`prep train` with adapters: what is trained, saved and resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prepcli.cli.main import main
from prepcli.errors import OK, STOPPED
from prepcli.formats.manifest import read_manifest
from prepcli.restore.item_reader import open_reader
from tests.prepcli.commands.test_train import make_training_folder

LORA = '\n[lora]\nrank = 4\ntargets = ["attn.q", "attn.v", "mlp.*"]\n'


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    recipe = Path("recipe.toml")
    recipe.write_text(recipe.read_text() + LORA)
    return tmp_path


def read_leaves(path: Path) -> dict[str, np.ndarray]:
    """Read all leaves of a step."""
    leaves: dict[str, np.ndarray] = {}
    with open_reader(path) as reader:
        for name, spec in reader.leaves.items():
            leaves[name] = np.empty(spec.shape, spec.dtype)
            reader.read(name, {tuple((0, extent) for extent in spec.shape): leaves[name]})
    return leaves


def test_lora_run_saves_adapters_alone(work_dir: Path):
    assert main(["train", "recipe.toml", "--set", "train.steps=3", "-q"]) == OK
    leaves = read_leaves(Path("runs/recipe/3"))
    params = {name for name in leaves if name.startswith("params.")}
    projections = ("attn.q", "attn.v", "mlp.gate", "mlp.up", "mlp.down")
    assert params == {f"params.layers.{name}.lora_{matrix}" for name in projections for matrix in "ab"}
    moments = {name.replace("params.", f"opt_state.adam.{moment}.") for name in params for moment in ("mu", "nu")}
    assert {name for name in leaves if name.startswith("opt_state.")} == moments | {"opt_state.adam.count"}
    assert all(leaves[name].any() for name in params)


def test_stopped_lora_run_resumes_exactly(work_dir: Path):
    assert main(["train", "recipe.toml", "--out", "whole", "-q"]) == OK
    assert main(["train", "recipe.toml", "--out", "parts", "--stop-after", "5", "-q"]) == STOPPED
    assert main(["train", "recipe.toml", "--out", "parts", "--set", "mesh=1,2,4", "-q"]) == OK
    whole, parts = (read_leaves(Path(run) / "12") for run in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


def test_manifest_of_lora_step_names_the_base(work_dir: Path):
    assert main(["train", "recipe.toml", "--set", "train.steps=3", "-q"]) == OK
    manifest = read_manifest(Path("runs/recipe/3"))
    assert manifest is not None
    targets = ["attn.q", "attn.v", "mlp.*"]
    assert manifest["lora"] == {"rank": 4, "alpha": 8.0, "targets": targets, "use_rslora": False}
    assert manifest["base"]["name"] == "tiny-init"
    assert len(manifest["base"]["digest"]) == 16
