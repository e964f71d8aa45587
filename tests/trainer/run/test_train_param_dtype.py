"""`prep train` with parameters in bfloat16: notes, checkpoints, resuming, export and loading."""

# pyright: reportTypedDictNotRequiredAccess=false
# The manifests of complete outputs have the keys that these tests read.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.models.param_tree import flatten_tree
from prepcli.restore.item_reader import open_reader
from tests.helpers.run_cli import run_code, run_ok
from tests.helpers.train_runs import set_keys
from tests.helpers.training_folder import make_training_folder
from tests.helpers.training_states import read_leaves, same_state

OPTIONS = set_keys("model.param_dtype=bfloat16", "train.steps=4", "checkpoint.every=0")
LORA = set_keys("lora.rank=4", "lora.targets=['attn.q']")


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    return tmp_path


def read_step(path: str) -> dict[str, Any]:
    """Read all leaves of a step."""
    with open_reader(Path(path)) as reader:
        return read_leaves(reader)


def test_bfloat16_run_is_saved_resumed_and_exported(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", "recipe.toml", "--out", "whole", *OPTIONS]) == OK
    num_values = sum(
        leaf.size for name, leaf in read_step("tiny-init").items() if name.startswith("params.")
    )
    words = " ".join(capsys.readouterr().err.split())
    assert "parameters float32 -> bfloat16: " in words
    assert f" of {num_values:,} values changed" in words
    assert (
        run_code("train", "recipe.toml", "--out", "parts", "--stop-after", "2", *OPTIONS) == STOPPED
    )
    capsys.readouterr()
    assert main(["train", "recipe.toml", "--out", "parts", *OPTIONS]) == OK
    assert "values changed" not in capsys.readouterr().err
    state = read_step("parts/4")
    assert same_state(state, read_step("whole/4"))
    assert {leaf.dtype.name for name, leaf in state.items() if name.startswith("params.")} == {
        "bfloat16"
    }
    assert {
        leaf.dtype.name for name, leaf in state.items() if name.startswith("opt_state.adam.mu")
    } == {"float32"}
    manifest = json.loads(Path("parts", "4", MANIFEST_FILE).read_bytes())
    assert 'param_dtype = "bfloat16"' in manifest["recipe"]
    run_ok("reshard", "parts", "--mesh", "1,4,2", "--no-scan", "--out", "apart")
    run_ok("verify", "apart", "parts")
    run_ok("export", "apart", "--out", "narrow")
    run_ok("verify", "narrow", "parts")
    run_ok("export", "parts", "--dtype", "float32", "--out", "wide")
    for checkpoint in ("parts", "narrow", "wide"):
        for path, leaf in flatten_tree(prep.load_params(checkpoint, "1,2,4")).items():
            # An export has no padding rows.
            expected = state[f"params.{path}"][tuple(map(slice, leaf.shape))]
            assert np.array_equal(np.asarray(leaf), expected.astype(np.float32)), (checkpoint, path)


def test_float32_run_starts_from_a_bfloat16_step(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    run_ok("train", "recipe.toml", "--out", "narrow", *OPTIONS)
    capsys.readouterr()
    options = ["--set", "model.path=narrow/4", "--stop-after", "3"]
    assert main(["train", "recipe.toml", "--out", "wide", *options]) == STOPPED
    assert "values changed" not in capsys.readouterr().err
    assert {leaf.dtype.name for name, leaf in read_step("wide/3").items() if "." in name} == {
        "float32",
        "int32",
    }


def test_run_does_not_resume_with_another_param_dtype(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_code("train", "recipe.toml", "--stop-after", "1", *OPTIONS) == STOPPED
    assert (
        run_code("train", "recipe.toml", *OPTIONS, "--set", "model.param_dtype=float32") == FAILED
    )
    assert 'model.param_dtype: "bfloat16" -> "float32"' in capsys.readouterr().err


# By default test_bfloat16_run_is_saved_resumed_and_exported has all parameters in bfloat16.
@pytest.mark.slow
def test_bfloat16_adapters_are_saved_and_exported(work_dir: Path):
    assert (
        run_code("train", "recipe.toml", "--out", "run", *OPTIONS, *LORA, "--stop-after", "2")
        == STOPPED
    )
    run_ok("train", "recipe.toml", "--out", "run", *OPTIONS, *LORA)
    params = {name: leaf for name, leaf in read_step("run/4").items() if name.startswith("params.")}
    assert {leaf.dtype.name for leaf in params.values()} == {"bfloat16"}
    run_ok("export", "run", "--out", "adapter")
    run_ok("merge", "adapter", "tiny", "--out", "merged")


@pytest.mark.slow  # test_random_start and the tests above show each
def test_random_start_in_bfloat16_saves_bfloat16(work_dir: Path):
    recipe = Path("recipe.toml")
    recipe.write_text(
        recipe.read_text().replace('path = "tiny-init"', 'init = "random"\nconfig = "tiny"')
    )
    run_ok("train", "recipe.toml", "--out", "run", *OPTIONS)
    params = {name: leaf for name, leaf in read_step("run/4").items() if name.startswith("params.")}
    assert {leaf.dtype.name for leaf in params.values()} == {"bfloat16"}
