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
from tests.helpers.training_folder import make_training_folder
from tests.helpers.training_states import read_leaves, same_state

OPTIONS = [
    "--set",
    "model.param_dtype=bfloat16",
    "--set",
    "train.steps=4",
    "--set",
    "checkpoint.every=0",
]
LORA = ["--set", "lora.rank=4", "--set", "lora.targets=['attn.q']"]


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
        main(["train", "recipe.toml", "--out", "parts", "--stop-after", "2", *OPTIONS, "-q"])
        == STOPPED
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
    assert main(["reshard", "parts", "--mesh", "1,4,2", "--no-scan", "--out", "apart", "-q"]) == OK
    assert main(["verify", "apart", "parts", "-q"]) == OK
    assert main(["export", "apart", "--out", "narrow", "-q"]) == OK
    assert main(["verify", "narrow", "parts", "-q"]) == OK
    assert main(["export", "parts", "--dtype", "float32", "--out", "wide", "-q"]) == OK
    for checkpoint in ("parts", "narrow", "wide"):
        for path, leaf in flatten_tree(prep.load_params(checkpoint, "1,2,4")).items():
            # An export has no padding rows.
            expected = state[f"params.{path}"][tuple(map(slice, leaf.shape))]
            assert np.array_equal(np.asarray(leaf), expected.astype(np.float32)), (checkpoint, path)


def test_float32_run_starts_from_a_bfloat16_step(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", "recipe.toml", "--out", "narrow", *OPTIONS, "-q"]) == OK
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
    assert main(["train", "recipe.toml", "--stop-after", "1", *OPTIONS, "-q"]) == STOPPED
    assert (
        main(["train", "recipe.toml", *OPTIONS, "--set", "model.param_dtype=float32", "-q"])
        == FAILED
    )
    assert 'model.param_dtype: "bfloat16" -> "float32"' in capsys.readouterr().err


# By default test_bfloat16_run_is_saved_resumed_and_exported has all parameters in bfloat16.
@pytest.mark.slow
def test_bfloat16_adapters_are_saved_and_exported(work_dir: Path):
    assert (
        main(["train", "recipe.toml", "--out", "run", *OPTIONS, *LORA, "--stop-after", "2", "-q"])
        == STOPPED
    )
    assert main(["train", "recipe.toml", "--out", "run", *OPTIONS, *LORA, "-q"]) == OK
    params = {name: leaf for name, leaf in read_step("run/4").items() if name.startswith("params.")}
    assert {leaf.dtype.name for leaf in params.values()} == {"bfloat16"}
    assert main(["export", "run", "--out", "adapter", "-q"]) == OK
    assert main(["merge", "adapter", "tiny", "--out", "merged", "-q"]) == OK


@pytest.mark.slow  # test_random_start and the tests above show each
def test_random_start_in_bfloat16_saves_bfloat16(work_dir: Path):
    recipe = Path("recipe.toml")
    recipe.write_text(
        recipe.read_text().replace('path = "tiny-init"', 'init = "random"\nconfig = "tiny"')
    )
    assert main(["train", "recipe.toml", "--out", "run", *OPTIONS, "-q"]) == OK
    params = {name: leaf for name, leaf in read_step("run/4").items() if name.startswith("params.")}
    assert {leaf.dtype.name for leaf in params.values()} == {"bfloat16"}
