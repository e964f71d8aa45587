"""`--ema`: the moving average of a run's parameters in place of the parameters, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import prepcli as prep
from prepcli.models.param_tree import Tree, flatten_tree
from tests.helpers.optimizers import make_optimizer
from tests.helpers.run_cli import error_lines, run_json, run_ok
from tests.helpers.tiny_checkpoints import same_bits
from tests.helpers.training_folder import WORDS, make_training_folder, write_tokenizer
from tests.helpers.training_states import save_steps
from tests.prepcli.commands.operations.test_optimizer_states import FREEZE, make_run
from tests.trainer.run.test_lora import LORA, read_leaves


@pytest.fixture
def run_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Make the run `run`, and the run `averaged` with the averages of `run` as its parameters. Return the averages."""
    monkeypatch.chdir(tmp_path)
    state = make_run("llama", make_optimizer("adamw", ema=0.9))
    prefix = "opt_state.ema."
    averages = {
        f"params.{name.removeprefix(prefix)}": leaf
        for name, leaf in state.items()
        if name.startswith(prefix)
    }
    save_steps(Path("averaged"), Path("m-init"), {4: state | averages}, mesh="1,1,4")
    return averages


def assert_equal_averages(params: Tree, averages: Mapping[str, np.ndarray]) -> None:
    """Assert that parameters have the bits of the averages."""
    leaves = {f"params.{path}": np.asarray(leaf) for path, leaf in flatten_tree(params).items()}
    assert {*leaves} == {*averages}
    assert all(same_bits(leaf, averages[name]) for name, leaf in leaves.items())


def test_export_of_averages_equals_export_of_parameters(run_state: dict[str, np.ndarray]):
    run_ok("export", "run", "--ema", "--out", "a")
    run_ok("export", "averaged", "--out", "b")
    names = sorted(path.name for path in Path("a").glob("*.safetensors"))
    assert names
    assert all(Path("a", name).read_bytes() == Path("b", name).read_bytes() for name in names)
    run_ok("export", "run", "--out", "c")
    assert Path("c", names[0]).read_bytes() != Path("a", names[0]).read_bytes()


@pytest.mark.parametrize("mesh", [None, "1,2,4"])
def test_load_params_reads_averages(run_state: dict[str, np.ndarray], mesh: str | None):
    assert_equal_averages(prep.load_params("run", mesh, ema=True), run_state)


def test_averages_of_resharded_run_load(run_state: dict[str, np.ndarray]):
    """Layers on axis 1 are stacked on axis 0 while they are read."""
    run_ok("reshard", "run", "--scan-axis", "1", "--out", "across")
    assert_equal_averages(prep.load_params("across", "1,2,4", ema=True), run_state)


def test_generate_computes_with_averages(
    run_state: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
):
    words = ("--tokens", "3,1,4", "--max-new-tokens", "4")
    capsys.readouterr()
    averaged = run_json(capsys, "generate", "averaged", *words)["tokens"]
    assert run_json(capsys, "generate", "run", "--ema", *words)["tokens"] == averaged
    assert run_json(capsys, "generate", "run", *words)["tokens"] != averaged


def test_eval_computes_with_averages(
    run_state: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
):
    Path("words").mkdir()
    write_tokenizer(Path("words"))
    Path("text.txt").write_text(" ".join(WORDS))
    words = ("--data", "text.txt", "--seq-length", "16", "--tokenizer", "words")
    averaged = run_json(capsys, "eval", "averaged", *words)["loss"]
    assert run_json(capsys, "eval", "run", "--ema", *words)["loss"] == averaged
    assert run_json(capsys, "eval", "run", *words)["loss"] != averaged
    assert (
        prep.evaluate("run", "text.txt", seq_length=16, tokenizer="words", ema=True).loss
        == averaged
    )


def test_checkpoints_without_averages_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(tmp_path)
    make_run("llama", make_optimizer("adamw", **FREEZE))
    capsys.readouterr()
    lines = error_lines(capsys, "export", "m-init", "--ema")
    assert lines[0] == "error: m-init has no averaged parameters"
    assert lines[2] == " hint: remove `--ema`"
    lines = error_lines(capsys, "generate", "run", "--ema", "--tokens", "1")
    assert lines[0] == "error: run has averages of some parameters only"


def test_export_of_averaged_adapters_has_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    make_training_folder()
    recipe = Path("recipe.toml")
    recipe.write_text(recipe.read_text() + LORA)
    run_ok(
        "train",
        "recipe.toml",
        "--set",
        "train.steps=3",
        "--set",
        "optimizer.ema=0.5",
        "--out",
        "run",
    )
    run_ok("export", "run", "--ema", "--out", "adapter")
    leaves = read_leaves(Path("run/3"))
    exported = load_file("adapter/adapter_model.safetensors").values()
    for prefix, is_exported in (("opt_state.ema.", True), ("params.", False)):
        expected = [leaf for name, leaf in leaves.items() if name.startswith(prefix)]
        values, other = (
            np.sort(np.concatenate([leaf.ravel() for leaf in side]))
            for side in (exported, expected)
        )
        assert np.array_equal(values, other) == is_exported
