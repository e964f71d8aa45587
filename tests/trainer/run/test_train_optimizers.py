"""`prep train` with every optimizer, dtype and storage of its steps: stop, resume, reshard and export."""

# pyright: reportTypedDictNotRequiredAccess=false
# The manifests of complete outputs have the keys that these tests read.
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED, USAGE
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.models.param_tree import flatten_tree
from prepcli.restore.item_reader import open_reader
from tests.helpers.optimizers import KEYS
from tests.helpers.run_cli import run_code, run_ok
from tests.helpers.train_runs import set_keys
from tests.helpers.training_states import read_leaves, same_state

# `prep train` with every optimizer: stop, resume, reshard and export.

RULE = {"adafactor": ["min_factored_size=8"], "palm": ["warmup_steps=10"]}


COMPACT = ["ema=0.9", "moment_dtype=bfloat16", "decay_exclude=re:attn"]


FREEZE = "freeze=['embed.tokens', 're:mlp|norm']"  # what is not frozen takes time to compile


STEPS = [*set_keys("train.steps=4", "checkpoint.every=0"), "-q"]


def options_of(name: str) -> list[str]:
    """Return the `--set` options of an optimizer with all that it can keep between steps."""
    keys = [f"type={name}", *RULE.get(name, []), *COMPACT, FREEZE]
    return set_keys(*(f"optimizer.{key}" for key in keys))


# By default test_bfloat16_run_is_saved_resumed_and_exported takes these steps with AdamW, and test_resume
# and test_optimizer_states restore the state of the others.
@pytest.mark.slow
@pytest.mark.parametrize("name", KEYS)
def test_stopped_run_resumes_and_reshards(work_dir: Path, name: str):
    options = [*options_of(name), *STEPS]
    assert main(["train", "recipe.toml", "--out", "whole", *options]) == OK
    assert (
        main(["train", "recipe.toml", "--out", "parts", "--stop-after", "2", *options]) == STOPPED
    )
    assert main(["train", "recipe.toml", "--out", "parts", *options]) == OK
    with open_reader(Path("whole/4")) as whole, open_reader(Path("parts/4")) as parts:
        state = read_leaves(parts)
        assert same_state(state, read_leaves(whole))
    assert any(leaf.startswith("opt_state.ema.layers") for leaf in state)
    assert not any(leaf.startswith("opt_state") and leaf.endswith("embed.tokens") for leaf in state)
    run_ok("reshard", "parts", "--mesh", "1,4,2", "--no-scan", "--out", "apart")
    run_ok("verify", "apart", "parts")
    run_ok("export", "apart", "--out", "learned")
    run_ok("verify", "learned", "parts")


def test_summary_states_batch_and_optimizer_size(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    sizes: dict[str, str] = {}
    for name in ("adamw", "lion"):
        assert main(["train", "recipe.toml", "--dry-run", "--set", f"optimizer.type={name}"]) == OK
        summary = capsys.readouterr().err
        assert "batch 8 x 16 = 128 tokens per step" in summary
        (sizes[name],) = re.findall(r"([\d.]+) KiB of parameters and moments per device", summary)
    assert float(sizes["lion"]) == pytest.approx(float(sizes["adamw"]) * 2 / 3, rel=0.01)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            ["type=lion", "eps=1e-6"],
            "unknown key `optimizer.eps` hint: `eps` is a key of adamw, muon",
        ),
        (["freeze=layers.attention"], "`layers.attention` of `optimizer.freeze` matches no leaf"),
        (["decay_exclude=re:xyz"], "`re:xyz` of `optimizer.decay_exclude` matches no leaf"),
    ],
)
def test_wrong_optimizer_keys_are_errors(
    work_dir: Path, capsys: pytest.CaptureFixture[str], keys: list[str], words: str
):
    options = set_keys(*(f"optimizer.{key}" for key in keys))
    assert main(["train", "recipe.toml", *options]) == USAGE
    assert words in " ".join(capsys.readouterr().err.split())


# `prep train` with parameters in bfloat16: notes, checkpoints, resuming, export and loading.

OPTIONS = set_keys("model.param_dtype=bfloat16", "train.steps=4", "checkpoint.every=0")


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


def test_run_does_not_resume_with_another_param_dtype(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_code("train", "recipe.toml", "--stop-after", "1", *OPTIONS) == STOPPED
    assert (
        run_code("train", "recipe.toml", *OPTIONS, "--set", "model.param_dtype=float32") == FAILED
    )
    assert 'model.param_dtype: "bfloat16" -> "float32"' in capsys.readouterr().err


# `checkpoint.storage`: the steps of a run as arrays of zarr 3, which Orbax and all commands read.

SETTINGS = ("mesh=1,2,4", "checkpoint.every=1", "checkpoint.keep='all'", "data.holdout=0")


def train(run: str, *settings: str) -> None:
    words = set_keys(*SETTINGS, *settings)
    run_ok("train", "recipe.toml", "--out", run, *words)


def uses_zarr3(step: Path) -> bool:
    return json.loads((step / "state/_METADATA").read_text())["use_zarr3"]


def restored(step: Path) -> list[np.ndarray]:
    """Restore the state of a step with Orbax."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore((step / "state").absolute())
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_run_changes_the_storage_of_its_steps_when_it_resumes(work_dir: Path):
    train("plain", "train.steps=3")
    train("run", "train.steps=1")
    train("run", "train.steps=3", "checkpoint.storage=zarr3")
    assert [uses_zarr3(Path("run") / step) for step in "123"] == [False, True, True]
    expected = restored(Path("plain/3"))
    actual = restored(Path("run/3"))
    assert len(expected) == len(actual)
    assert all(np.array_equal(a, b) for a, b in zip(actual, expected))
    run_ok("verify", "run")
    run_ok("export", "run", "--out", "hf")
    run_ok("reshard", "run", "--params-only", "--out", "init")
    run_ok("verify", "init", "hf")
