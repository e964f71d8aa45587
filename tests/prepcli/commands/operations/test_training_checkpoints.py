"""Commands on training checkpoints: steps, optimizers and averages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.formatting import format_bytes
from prepcli.models.param_tree import Tree, flatten_tree
from prepcli.restore.item_reader import open_reader
from tests.helpers.manifests import changed_manifest
from tests.helpers.optimizers import KEYS, make_optimizer
from tests.helpers.run_cli import Capture, error_lines, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    FAMILY_CONFIGS,
    GPT2,
    GPT_NEO,
    LLAMA,
    make_checkpoint,
    same_bits,
)
from tests.helpers.training_folder import WORDS, make_training_folder, write_tokenizer
from tests.helpers.training_states import (
    OPTIMIZER_SLOTS,
    TrainingState,
    make_mesh_init,
    make_state,
    read_leaves,
    read_params,
    reshard_and_back,
    same_state,
    save_steps,
    step_leaves,
)
from tests.prepcli.formats.test_orbax import run_orbax
from tests.trainer.run.test_lora import LORA
from tests.trainer.run.test_lora import read_leaves as read_step_leaves
from trainer.nn.model_spec import ForwardConfig, model_from_manifest
from trainer.training.optimizers import Optimizer
from trainer.training.step import StepSetup, leaf_name, state_shapes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model `m`, its init `m-init`, and a run `tuned` with steps 3 and 5 of different values."""
    folder = tmp_path_factory.mktemp("made")
    make_mesh_init(folder, "float32")
    params = read_params(folder / "m-init")
    changed = {name: value + np.float32(0.5) for name, value in params.items()}
    save_steps(
        folder / "tuned", folder / "m-init", {3: make_state(params, 3), 5: make_state(changed, 5)}
    )
    return folder


@pytest.fixture
def work_dir(made: Path, tmp_path: Path) -> Path:
    """Copy the shared checkpoints to a new working folder."""
    for name in ("m", "m-init", "tuned"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


def run_stdout_stderr(capsys: Capture, *args: str, code: int = 0) -> tuple[str, str]:
    """Run a command and return stdout and stderr."""
    capsys.readouterr()
    assert main([*args, "--progress", "none"]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def nbytes_of(state: TrainingState, prefix: str) -> int:
    return sum(value.nbytes for name, value in state.items() if name.startswith(prefix))


def test_reshard_unstacks_optimizer_state(work_dir: Path):
    run_ok("reshard", "tuned", "--no-scan", "--out", "apart")
    stacked, apart = step_leaves("tuned"), step_leaves("apart")
    for slot in ("params", *OPTIMIZER_SLOTS):
        for layer in range(3):
            moved = apart[f"{slot}.layers.{layer}.mlp.up.weight"]
            assert same_bits(moved, stacked[f"{slot}.layers.mlp.up.weight"][layer])
    assert same_bits(apart["opt_state.adam.count"], np.array(5, np.int32))


def test_params_only_writes_an_init(work_dir: Path, capsys: Capture):
    out, err = run_stdout_stderr(capsys, "reshard", "tuned", "--params-only", "--mesh", "1,2,2")
    assert out == "tuned-1x2x2\n"
    size = format_bytes(nbytes_of(step_leaves("tuned"), "opt_state."))
    assert f"optimizer state ({size}) dropped\n" in err
    manifest = json.loads(Path("tuned-1x2x2/prep-manifest.json").read_text())
    assert (manifest["kind"], "step" in manifest, "slots" in manifest) == ("init", False, False)
    dropped = {entry["name"] for entry in manifest["dropped"]}
    assert dropped == {*OPTIMIZER_SLOTS, "opt_state.adam.count", "step", "skipped"}
    assert {name.split(".")[0] for name in step_leaves("tuned-1x2x2")} == {"params"}
    run_ok("verify", "tuned-1x2x2", "tuned")
    assert main(["verify", "tuned-1x2x2", "m-init", "-q"]) == 1


def test_export_of_step_reports_dropped_state(work_dir: Path, capsys: Capture):
    out, err = run_stdout_stderr(capsys, "export", "tuned", "--step", "3")
    assert out == "tuned-hf\n"
    state = step_leaves("tuned/3")
    size = format_bytes(nbytes_of(state, "opt_state."))
    assert "tuned step 3 -> Hugging Face safetensors, 1 file; 5 rows of padding removed;" in err
    assert f"; optimizer state ({size}) dropped\n" in err
    assert "next: prep verify tuned-hf tuned/3" in err
    run_ok("verify", "tuned-hf", "./m")
    _, err = run_stdout_stderr(capsys, "verify", "tuned-hf", "tuned/3")
    size = format_bytes(nbytes_of(state, "") - nbytes_of(state, "params."))
    assert f"training state of tuned/3 ({size}) ignored: only parameters are compared" in err


def test_last_step_is_the_default(work_dir: Path):
    run_ok("export", "tuned")
    run_ok("verify", "tuned-hf", "tuned/5")
    assert main(["verify", "tuned-hf", "tuned/3", "-q"]) == 1


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["export", "tuned", "--step", "4"], ("tuned has no step 4", "its steps are 3, 5")),
        (
            ["reshard", "m-init", "--step", "4"],
            ("m-init has no step 4", "it is not the folder of a run"),
        ),
    ],
)
def test_missing_step_is_a_usage_error(
    work_dir: Path, capsys: Capture, words: list[str], lines: tuple[str, str]
):
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[:2] == [f"error: {lines[0]}", f"  why: {lines[1]}"]


def test_run_is_the_default_checkpoint(work_dir: Path, capsys: Capture):
    shutil.rmtree("m-init")
    _, err = run_stdout_stderr(capsys, "export")
    assert "using ./tuned (the only prep checkpoint here)" in err
    run_ok("reshard", "--mesh", "1,4,2")
    run_ok("verify", "tuned-1x4x2", "./tuned")


def test_verify_checks_scalars(work_dir: Path, capsys: Capture):
    with changed_manifest(Path("tuned/5")) as manifest:
        manifest["others"]["skipped"]["digests"] = manifest["others"]["step"]["digests"]
    _, err = run_stdout_stderr(capsys, "verify", "tuned", code=1)
    assert "differs  skipped  rows 0:1 do not match their recorded digest" in err


def test_verify_reports_missing_optimizer_state(work_dir: Path, capsys: Capture):
    state = step_leaves("tuned/5")
    bare = {name: leaf for name, leaf in state.items() if not name.startswith("opt_state")}
    save_steps(Path("bare"), Path("m-init"), {5: bare})
    run_ok("verify", "bare")
    _, err = run_stdout_stderr(capsys, "verify", "tuned", "bare", "-v", code=1)
    assert "opt_state.adam.mu.embed.tokens (transformer.wte.weight)  is not in bare" in err
    assert "error: tuned is not the same as bare (87 of 132 tensors)" in err


def test_inspect_lists_parameters_and_moments(work_dir: Path, capsys: Capture):
    capsys.readouterr()
    assert main(["inspect", "tuned", "-q"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step 5: parameters" in lines[1]
    assert "optimizer state" in lines[1]
    assert any(line.startswith("opt_state.adam.nu.layers.mlp.up.weight") for line in lines)
    for options in (["--tree"], ["--stats"], ["--shards", "embed.tokens"], ["opt_state.*.mu.*"]):
        run_ok("inspect", "tuned/3", *options)
    capsys.readouterr()
    assert main(["inspect", "tuned", "--json", "-q"]) == 0
    source = json.loads(capsys.readouterr().out)["source"]
    params = sum(v.size for name, v in step_leaves("tuned").items() if name.startswith("params."))
    assert (source["step"], source["parameters"]) == (5, params)
    assert source["optimizer_bytes"] == 2 * 4 * params + 4


def test_save_init_rejects_training_checkpoint(work_dir: Path, capsys: Capture):
    assert main(["save-init", "tuned"]) == 2
    assert "tuned is already an Orbax checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["tuned/5", "tuned/5/state/x"])
def test_export_into_a_step_is_rejected(work_dir: Path, capsys: Capture, out: str):
    assert main(["export", "tuned", "--out", out]) == 2
    assert "sources are never written to" in capsys.readouterr().err


def test_orbax_v1_loads_an_init_and_a_step(made: Path) -> None:
    assert not run_orbax("v1-paths", made / "m-init", made / "tuned", made / "tuned" / "5")


# The state of every optimizer moves with its parameters: to other meshes, and between stacked and single layers


OPTIMIZER_BASES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt_neo": GPT_NEO,
    "llama": LLAMA,
    "mixtral": FAMILY_CONFIGS["mixtral"],
}
FREEZE = {"freeze": ("re:attn\\.[qk]", "embed.tokens"), "ema": 0.9, "moment_dtype": "bfloat16"}
CASES = [(base, name, keys) for base in OPTIMIZER_BASES for name in KEYS for keys in ({}, FREEZE)]
DEFAULT_CASES = [("gpt2", "adafactor", FREEZE)]


def make_run(base: str, optimizer: Optimizer) -> TrainingState:
    """Write an init and a run whose step has the leaves of an optimizer with random values, and return the state."""
    make_checkpoint(
        Path("m"), OPTIMIZER_BASES[base], hidden_size=64, num_heads=4, num_attention_heads=4
    )
    run_ok("save-init", "./m", "--pad-vocab", "8", "--mesh", "1,2,1")
    with open_reader(Path("m-init")) as reader:
        setup = StepSetup(model_from_manifest(reader.manifest), ForwardConfig(), optimizer)
    rng = np.random.default_rng(0)
    state = {
        leaf_name(path): np.asarray(100 * rng.standard_normal(leaf.shape)).astype(leaf.dtype)
        for path, leaf in jax.tree_util.tree_flatten_with_path(state_shapes(setup))[0]
    }
    save_steps(Path("run"), Path("m-init"), {4: state}, mesh="1,1,4")
    return state


@pytest.mark.parametrize(("base", "name", "keys"), slow_except(CASES, DEFAULT_CASES))
def test_reshard_keeps_every_optimizer(base: str, name: str, keys: dict[str, Any]):
    """Reshard to other meshes, without stacking, with layers on either axis, and back."""
    state = make_run(base, make_optimizer(name, **keys))
    reshard_and_back()
    assert same_state(step_leaves("r3"), state)
    apart = step_leaves("r1")
    for leaf, values in state.items():
        before, found, after = leaf.partition(".layers.")
        if found:
            assert all(
                same_bits(apart[f"{before}.layers.{i}.{after}"], value)
                for i, value in enumerate(values)
            )
        else:
            assert same_bits(apart[leaf], values)


@pytest.mark.slow
def test_statistics_have_a_chunk_per_layer():
    make_run("llama", make_optimizer("adafactor"))
    run_ok("reshard", "run", "--mesh", "1,2,4", "--out", "moved")
    with open_reader(Path("moved")) as reader:
        leaves, slots = reader.manifest["leaves"], reader.manifest["slots"]
    chunks = {name: (leaf["shape"], leaf["chunk"]) for name, leaf in leaves.items()}
    assert chunks["opt_state.rms.v_row.layers.mlp.up.weight"] == ([3, 48, 1], [1, 48, 1])
    assert chunks["opt_state.rms.v_col.layers.mlp.up.weight"] == ([3, 1, 64], [1, 1, 64])
    assert slots["opt_state.rms.v_row"]["/layers.2.mlp.up.weight"]["shape"] == [48, 1]
    assert "opt_state.momentum.ema" in slots, "a complete slot has the names of the model's tensors"
    assert "model.layers.2.mlp.up_proj.weight" in slots["opt_state.momentum.ema"]


# `--ema`: the moving average of a run's parameters in place of the parameters, bit by bit


@pytest.fixture
def run_state() -> dict[str, np.ndarray]:
    """Make the run `run`, and the run `averaged` with the averages of `run` as its parameters. Return the averages."""
    state = make_run("llama", make_optimizer("adamw", ema=0.9))
    prefix = "opt_state.ema."
    averages = {
        f"params.{name.removeprefix(prefix)}": leaf
        for name, leaf in state.items()
        if name.startswith(prefix)
    }
    save_steps(Path("averaged"), Path("m-init"), {4: state | averages}, mesh="1,1,4")
    return averages


def test_export_of_averages_equals_export_of_parameters(run_state: dict[str, np.ndarray]):
    run_ok("export", "run", "--ema", "--out", "a")
    run_ok("export", "averaged", "--out", "b")
    names = sorted(path.name for path in Path("a").glob("*.safetensors"))
    assert names
    assert all(Path("a", name).read_bytes() == Path("b", name).read_bytes() for name in names)
    run_ok("export", "run", "--out", "c")
    assert Path("c", names[0]).read_bytes() != Path("a", names[0]).read_bytes()


def test_generate_computes_with_averages(run_state: dict[str, np.ndarray], capsys: Capture):
    words = ("--tokens", "3,1,4", "--max-new-tokens", "4")
    capsys.readouterr()
    averaged = run_json(capsys, "generate", "averaged", *words)["tokens"]
    assert run_json(capsys, "generate", "run", "--ema", *words)["tokens"] == averaged
    assert run_json(capsys, "generate", "run", *words)["tokens"] != averaged


def test_checkpoints_without_averages_are_errors(capsys):
    make_run("llama", make_optimizer("adamw", **FREEZE))
    capsys.readouterr()
    lines = error_lines(capsys, "export", "m-init", "--ema")
    assert lines[0] == "error: m-init has no averaged parameters"
    assert lines[2] == " hint: remove `--ema`"
    lines = error_lines(capsys, "generate", "run", "--ema", "--tokens", "1")
    assert lines[0] == "error: run has averages of some parameters only"


def assert_equal_averages(params: Tree, averages: Mapping[str, np.ndarray]) -> None:
    """Assert that parameters have the bits of the averages."""
    leaves = {f"params.{path}": np.asarray(leaf) for path, leaf in flatten_tree(params).items()}
    assert {*leaves} == {*averages}
    assert all(same_bits(leaf, averages[name]) for name, leaf in leaves.items())


def flip_byte_at(path: Path, text: bytes) -> None:
    """Flip a bit at the first occurrence of `text` in one of the item's data files."""
    for file in (path / "state/d").iterdir():
        data = file.read_bytes()
        if (offset := data.find(text)) >= 0:
            file.write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])


def read_state(path: str) -> TrainingState:
    with open_reader(Path(path)) as reader:
        return read_leaves(reader)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaf", "called"),
    slow_except(
        [
            ("params.final_norm.bias", "transformer.ln_f.bias"),
            ("opt_state.adam.nu.final_norm.bias", "opt_state.adam.nu/transformer.ln_f.bias"),
            ("opt_state.adam.mu.embed.tokens", "opt_state.adam.mu/transformer.wte.weight"),
        ],
        [("opt_state.adam.nu.final_norm.bias", "opt_state.adam.nu/transformer.ln_f.bias")],
    ),
)
def test_verify_finds_flipped_bit_in_state(work_dir: Path, capsys: Capture, leaf: str, called: str):
    run_ok("verify", "tuned")
    shutil.copytree("tuned/5", "copy")
    flip_byte_at(Path("copy"), read_state("copy")[leaf].reshape(-1)[:40].tobytes())
    _, err = run_stdout_stderr(capsys, "verify", "copy", code=1)
    label = f"{leaf} ({called.rpartition('/')[2]})"
    assert f"differs  {label}" in err
    _, err = run_stdout_stderr(capsys, "verify", "copy", "tuned", code=1)
    assert f"differs  {label}  1 of " in err
    _, err = run_stdout_stderr(capsys, "reshard", "copy", "--mesh", "1,4,2", "--out", "x", code=1)
    assert f"{called} in copy is damaged" in err
    assert main(["verify", "copy", "m-init", "-q"]) == 1  # the values differ
    assert not Path("x").exists()


@pytest.mark.slow
def test_eval_computes_with_averages(run_state: dict[str, np.ndarray], capsys: Capture):
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


@pytest.mark.slow
@pytest.mark.parametrize("mesh", slow_except([None, "1,2,4"], ["1,2,4"]))
def test_load_params_reads_averages(run_state: dict[str, np.ndarray], mesh: str | None):
    assert_equal_averages(prep.load_params("run", mesh, ema=True), run_state)


@pytest.mark.slow
def test_export_of_averaged_adapters_has_their_values():
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
    leaves = read_step_leaves(Path("run/3"))
    exported = load_file("adapter/adapter_model.safetensors").values()
    for prefix, is_exported in (("opt_state.ema.", True), ("params.", False)):
        expected = [leaf for name, leaf in leaves.items() if name.startswith(prefix)]
        values, other = (
            np.sort(np.concatenate([leaf.ravel() for leaf in side]))
            for side in (exported, expected)
        )
        assert np.array_equal(values, other) == is_exported
