"""`prep train` with adapters: what is trained, saved and resumed, on any mesh."""

# pyright: reportTypedDictNotRequiredAccess=false
# The manifests of complete outputs have the keys that these tests read.
from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED, USAGE
from prepcli.formats.manifest import MANIFEST_FILE, NO_MANIFEST, read_manifest
from prepcli.models.lora_config import lora_from_manifest
from prepcli.restore.item_reader import open_reader
from tests.helpers.manifests import changed_manifest
from tests.helpers.processes import finish, start_processes
from tests.helpers.run_cli import run_code, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, assert_same, read_tensors
from tests.helpers.train_runs import read_losses, set_keys
from tests.helpers.training_folder import make_training_folder
from trainer.run.run_record import ENVIRONMENT_FILE

# `prep train` with adapters: what is trained, saved and resumed.

LORA = '\n[lora]\nrank = 4\ntargets = ["attn.q", "attn.v", "mlp.*"]\n'


@pytest.fixture
def work_dir(work_dir: Path) -> Path:
    write_lora_recipe()
    return work_dir


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of three steps, and its adapter."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        make_training_folder()
        write_lora_recipe()
        run_ok("train", "recipe.toml")
        run_ok("export", "runs/recipe", "--out", "adapter")
    return folder


@pytest.fixture
def trained(trained_folder: Path, work_dir: Path) -> Path:
    """Copy the run and its adapter to the working folder of a test."""
    shutil.copytree(trained_folder, work_dir, dirs_exist_ok=True)
    return work_dir


def write_lora_recipe() -> None:
    """Write the recipe of three steps with adapters to the current folder.

    The number of steps is a constant of the compiled step.
    """
    recipe = Path("recipe.toml")
    recipe.write_text(recipe.read_text().replace("steps = 12", "steps = 3") + LORA)


def read_leaves(path: Path) -> dict[str, np.ndarray]:
    """Read all leaves of a step."""
    leaves: dict[str, np.ndarray] = {}
    with open_reader(path) as reader:
        for name, spec in reader.leaves.items():
            leaves[name] = np.empty(spec.shape, spec.dtype)
            reader.read(name, {tuple((0, extent) for extent in spec.shape): leaves[name]})
    return leaves


def test_lora_run_saves_adapters_alone(trained: Path):
    leaves = read_leaves(Path("runs/recipe/3"))
    params = {name for name in leaves if name.startswith("params.")}
    projections = ("attn.q", "attn.v", "mlp.gate", "mlp.up", "mlp.down")
    assert params == {
        f"params.layers.{name}.lora_{matrix}" for name in projections for matrix in "ab"
    }
    moments = {
        name.replace("params.", f"opt_state.adam.{moment}.")
        for name in params
        for moment in ("mu", "nu")
    }
    assert {name for name in leaves if name.startswith("opt_state.")} == moments | {
        "opt_state.adam.count"
    }
    assert all(leaves[name].any() for name in params)
    environment = json.loads(Path("runs/recipe", ENVIRONMENT_FILE).read_text())
    assert environment["trained_parameters"] == sum(leaves[name].size for name in params)
    assert environment["parameters"] > environment["trained_parameters"]


def test_restart_keeps_the_adapter_that_it_starts_from(
    trained: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = Path("recipe.toml")
    recipe.write_text(recipe.read_text().replace(LORA, '[lora]\npath = "runs/recipe/exports/3"\n'))
    Path("runs/recipe/exports").mkdir()
    shutil.copytree("adapter", "runs/recipe/exports/3")
    assert run_code("train", "recipe.toml", "--restart") == USAGE
    assert "would delete runs/recipe/exports" in capsys.readouterr().err
    assert Path("runs/recipe/exports/3").is_dir()


def test_manifest_of_lora_step_names_the_base(trained: Path):
    manifest = read_manifest(Path("runs/recipe/3"))
    assert manifest is not None
    targets = ["attn.q", "attn.v", "mlp.*"]
    assert manifest["lora"] == {
        "rank": 4,
        "alpha": 8.0,
        "targets": targets,
        "use_rslora": False,
    }
    assert manifest.base["name"] == "tiny-init"
    assert len(str(manifest.base["digest"])) == 16


def test_resume_on_another_base_is_an_error(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert run_code("train", "recipe.toml", "--stop-after", "2") == STOPPED
    shutil.copytree("tiny", "other")
    path = next(Path("other").glob("*.safetensors"))
    tensors = load_file(path)
    next(iter(tensors.values()))[0] += 1
    save_file(tensors, path)
    assert run_code("train", "recipe.toml", "--set", "model.path=other") == FAILED
    assert "other differs from the checkpoint that the run began with" in capsys.readouterr().err


def test_changed_adapter_settings_stop_a_resume(trained: Path, capsys: pytest.CaptureFixture[str]):
    for key in ("lora.rank=8", "lora.rank=0"):
        words = ["--set", key] + (
            ["--set", "lora.targets=['attn.q', 'attn.v']"] if key.endswith("0") else []
        )
        assert run_code("train", "recipe.toml", *words) == FAILED
        assert f"lora.rank: 4 -> {key[-1]}" in capsys.readouterr().err


def test_exported_adapter_starts_another_run(trained: Path):
    recipe = Path("recipe.toml")
    recipe.write_text(recipe.read_text().replace(LORA, '\n[lora]\npath = "adapter"\n'))
    run_ok("train", "recipe.toml", "--out", "second")
    first, second = (
        read_manifest(Path(run) / "3") or NO_MANIFEST for run in ("runs/recipe", "second")
    )
    first_lora = lora_from_manifest(first)
    second_lora = lora_from_manifest(second)
    assert first_lora is not None
    assert second_lora is not None
    assert second_lora == replace(first_lora, targets=second_lora.targets)
    assert second.tensors.keys() == first.tensors.keys()
    assert second.tensors != first.tensors


def other_model(row: int) -> None:
    """Write a copy of the base, `other`, with another value in a row of each tensor of layer 1."""
    shutil.copytree("tiny", "other")
    path = next(Path("other").glob("*.safetensors"))
    tensors = load_file(path)
    for name, values in tensors.items():
        if ".1." in name:
            values[row] += 1
    save_file(tensors, path)


@pytest.fixture
def adapter(trained: Path) -> Path:
    """Return the adapter of a run, whose recipe has the padded init of the base."""
    return Path("adapter")


def test_exported_adapter_is_checked_on_every_read(
    adapter: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["verify", "adapter"]) == OK
    weights = adapter / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    recipe = Path("recipe.toml")
    recipe.write_text(recipe.read_text().replace(LORA, '\n[lora]\npath = "adapter"\n'))
    for command in (
        ["verify", "adapter"],
        ["merge", "adapter", "tiny"],
        ["train", "recipe.toml", "--out", "second"],
    ):
        assert main(command) == FAILED
        error = capsys.readouterr().err
        assert "lora_" in error
        assert "adapter is damaged" in error


def test_merge_refuses_another_base(adapter: Path, capsys: pytest.CaptureFixture[str]):
    other_model(row=0)
    assert run_code("merge", "adapter", "other", "--out", "merged") == FAILED
    error = capsys.readouterr().err
    assert "adapter was trained with another base than other" in error
    assert "tiny-init" in error
    assert "--no-verify" in error
    assert not Path("merged").exists()
    run_ok("merge", "adapter", "other", "--no-verify", "--out", "merged")
    with pytest.raises(prep.PrepError, match="another base"):
        prep.merge("adapter", "other", "again")
    assert prep.merge("adapter", "other", "again", verify=False).path == Path("again")


def test_merge_takes_its_base_in_other_formats(adapter: Path):
    run_ok("reshard", "tiny-init", "--no-scan", "--compress", "zstd", "--out", "layers")
    run_ok("merge", "adapter", "tiny", "--out", "merged")
    expected = read_tensors(Path("merged"))
    for base in ("tiny-init", "layers"):
        run_ok("merge", "adapter", base, "--out", f"merged-{base}")
        merged = read_tensors(Path(f"merged-{base}"))
        # The vocabulary of both is padded from 131 to 136 rows.
        assert_same({name: merged[name][: len(expected[name])] for name in merged}, expected)


def test_merge_takes_adapters_without_a_digest(adapter: Path):
    other_model(row=0)
    with changed_manifest(adapter) as manifest:
        del manifest["base"]["sample_digest"]
    run_ok("merge", "adapter", "other", "--out", "merged")
    (adapter / MANIFEST_FILE).unlink()
    run_ok("merge", "adapter", "other", "--out", "merged", "--overwrite")


def test_steps_of_adapters_are_not_complete_models(
    trained: Path, capsys: pytest.CaptureFixture[str]
):
    for words in (
        ["generate", "runs/recipe", "--tokens", "1,2"],
        ["export", "runs/recipe", "--layout", "easylm"],
    ):
        assert run_code(*words) == USAGE
        assert "only adapters" in capsys.readouterr().err
    words = ["train", "recipe.toml", "--set", "model.path=runs/recipe", "--out", "second", "-q"]
    assert main(words) == USAGE
    assert "`model.path` is not a complete model" in capsys.readouterr().err


def test_verify_refuses_to_compare_adapters_with_a_model(
    trained: Path, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    for words in (["runs/recipe", "tiny-init"], ["tiny-init", "runs/recipe"]):
        assert run_code("verify", *words) == FAILED
        assert "runs/recipe has only adapters, and tiny-init is a model" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--map rows.txt", "--true-vocab 64", "--storage zarr3"])
def test_export_of_adapters_refuses_options_of_models(
    trained: Path, capsys: pytest.CaptureFixture[str], words: str
):
    Path("rows.txt").write_text("no row")
    assert run_code("export", "runs/recipe", *words.split()) == USAGE
    assert f"`{words}` " in capsys.readouterr().err
    assert not Path("recipe-adapter").exists()


def test_resharded_adapters_keep_their_values(trained: Path):
    run_ok("reshard", "runs/recipe", "--mesh", "1,1,8", "--rule", "kv_heads=none", "--out", "wide")
    before, after = read_leaves(Path("runs/recipe/3")), read_leaves(Path("wide"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lora.path=x"], "`lora.rank` is 4"),
        (["lora.rank=0"], "there are no adapters: `lora.rank` is 0"),
        (["lora.targets=['attn.z']"], "unknown projection 'attn.z' in `lora.targets`"),
        (["lora.modules_to_save=['embed_tokens']"], "did you mean `embed.tokens`?"),
        (["lora.modules_to_save=['norm']"], "unknown module 'norm' in `lora.modules_to_save`"),
        (["lora.rank_pattern={'attn.z' = 2}"], "it matches none of the adapters: attn.q"),
        (["lora.rank_pattern={'layers.0.attn.q' = 2}"], "settings by layer are not supported"),
        (["lora.target_parameters=['mlp.up']"], "llama has no experts in one tensor"),
    ],
)
def test_invalid_adapter_settings_are_errors(
    work_dir: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    options = set_keys(*words)
    assert run_code("train", "recipe.toml", *options) == USAGE
    assert message in capsys.readouterr().err


def test_dry_run_counts_the_state_of_adapters_alone(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", "recipe.toml", "--set", "lora.rank=1", "--dry-run", "--json"]) == OK
    lora = json.loads(capsys.readouterr().out)["memory"]
    options = set_keys("lora.rank=0", "lora.targets=['attn.q', 'attn.v']")
    assert main(["train", "recipe.toml", *options, "--dry-run", "--json"]) == OK
    full = json.loads(capsys.readouterr().out)["memory"]
    assert lora["moments"] < full["moments"] / 4
    assert lora["gradients"] < full["gradients"] / 4


def test_full_run_does_not_resume_with_adapters(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    options = set_keys("lora.rank=0", "lora.targets=['attn.q', 'attn.v']")
    assert run_code("train", "recipe.toml", *options, "--stop-after", "2") == STOPPED
    assert run_code("train", "recipe.toml") == FAILED
    err = capsys.readouterr().err
    assert "the recipe has changed since the last start" in err
    assert "lora.rank: 0 -> 4" in err


def train_with_dropout(*words: str) -> int:
    """Train with dropout, a module trained as a whole, and a rank of its own."""
    settings = (
        'dropout = 0.3\nmodules_to_save = ["embed.tokens"]\nrank_pattern = {"mlp.down" = 2}\n'
    )
    Path("dropout.toml").write_text(f"{Path('recipe.toml').read_text()}{settings}")
    return main(["train", "dropout.toml", "-q", *words])


def test_stopped_run_with_dropout_resumes_exactly(work_dir: Path):
    assert train_with_dropout("--out", "whole") == OK
    assert train_with_dropout("--out", "parts", "--stop-after", "2") == STOPPED
    assert train_with_dropout("--out", "parts") == OK
    whole, parts = (read_leaves(Path(run) / "3") for run in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert "params.embed.tokens" in whole
    assert whole["params.layers.mlp.down.lora_a"].shape[1] == 2
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


def test_dry_run_counts_modules_trained_as_a_whole(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    memory: list[dict[str, int]] = []
    for modules in ("[]", "['embed.tokens', 'head']"):
        words = set_keys(f"lora.modules_to_save={modules}", "lora.dropout=0.1")
        assert main(["train", "recipe.toml", *words, "--dry-run", "--json"]) == OK
        memory.append(json.loads(capsys.readouterr().out)["memory"])
    # Embedding and head [136, 32] on 8 devices: two moments of 4 bytes on each shard.
    assert memory[1]["moments"] - memory[0]["moments"] == 2 * 136 * 32 // 8 * 8
    assert memory[1]["parameters"] == memory[0]["parameters"]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("lm_head.base_layer.weight", "lm_head.base_layer.weight is not supported"),
        ("lm_head.lora_A.weight", "lm_head.lora_A.weight"),
        ("model.embed_tokens.lora_embedding_A", "model.embed_tokens.lora_embedding_A"),
        ("model.layers.0.input_layernorm.weight", "input_layernorm.weight is not supported"),
    ],
)
def test_adapter_with_other_tensors_is_not_continued(
    adapter: Path, tensor: str, message: str, capsys: pytest.CaptureFixture[str]
):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {f"base_model.model.{tensor}": np.zeros((4, 32), np.float32)}, path)
    (adapter / MANIFEST_FILE).unlink()
    config = adapter / "adapter_config.json"
    settings = json.loads(config.read_text())
    settings["target_modules"] += ["lm_head", "embed_tokens"]
    config.write_text(json.dumps(settings))
    recipe = Path("recipe.toml")
    recipe.write_text(recipe.read_text().replace(LORA, '\n[lora]\npath = "adapter"\n'))
    assert run_code("train", "recipe.toml", "--out", "second") == FAILED
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("layer", [0, 1])
def test_adapter_of_some_layers_is_not_continued(
    adapter: Path, layer: int, capsys: pytest.CaptureFixture[str]
):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    left_out = f"layers.{layer}.self_attn.q_proj."
    save_file({name: array for name, array in tensors.items() if left_out not in name}, path)
    (adapter / MANIFEST_FILE).unlink()
    recipe = Path("recipe.toml")
    recipe.write_text(recipe.read_text().replace(LORA, '\n[lora]\npath = "adapter"\n'))
    assert run_code("train", "recipe.toml", "--out", "second") == FAILED
    error = capsys.readouterr().err
    assert "adapter: adapters of some layers are not supported" in error
    assert f"layers.{layer}.self_attn.q_proj has none" in error
    assert "`prep merge` adds them to their base" in error


# Adapters of experts, and modules trained as a whole, on meshes of 8 devices: the results of one device.

# The vocabulary of 131 tokens is padded to 136 rows.
MIXTRAL = FAMILY_CONFIGS["mixtral"] | {"num_local_experts": 4}

LORA_OF_EXPERTS = """
[lora]
rank = 4
targets = ["attn.*"]
target_parameters = ["mlp.*"]
modules_to_save = ["embed.tokens", "head"]
rank_pattern = {"mlp.down" = 8}
use_rslora = true
"""

MESHES = {
    "tensor": ("1,2,4", ()),
    "experts": ("2,2,2", ("experts=mp",)),
    "experts-fsdp": ("1,4,2", ("experts=fsdp",)),
    "experts-whole-axis": ("1,4,2", ("experts=mp", "embed=none")),
    "sequences": ("fsdp:2,mp:2,sp:2", ("experts=mp",)),
    "hidden": ("1,4,2", ("mlp=fsdp+mp", "embed=none")),
    "data": ("8,1,1", ()),
    "fsdp": ("1,8,1", ()),
}


def train_command(out: str, mesh: str, rules: Sequence[str] = ()) -> list[str]:
    """Return the command that trains four steps on a mesh."""
    settings = [f"mesh={mesh}", f"rules={list(rules)}", "train.steps=4"]
    options = set_keys(*settings)
    return ["train", "recipe.toml", "--out", out, *options, "-q"]


def train_on_one_device(out: str) -> None:
    """Train in a process with one device. The process of the tests has 8."""
    results = finish(start_processes(*train_command(out, "1,1,1"), count=1, devices=1))
    assert results[0][0] == OK, results


def export(run: str) -> dict[str, np.ndarray]:
    """Return the tensors of the exported adapter of a run."""
    run_ok("export", run, "--out", f"{run}-adapter")
    return load_file(f"{run}-adapter/adapter_model.safetensors")


def assert_equal_runs(run: str, expected: str) -> None:
    """Assert that two runs have the same losses and adapters, up to the order of sums in float32."""
    assert read_losses(run) == pytest.approx(read_losses(expected), rel=1e-6)
    tensors, expected_tensors = export(run), export(expected)
    assert tensors.keys() == expected_tensors.keys()
    for name, values in tensors.items():
        # Adam with a learning rate of 1e-2 scales the rounding of small gradients.
        np.testing.assert_allclose(values, expected_tensors[name], atol=5e-5, err_msg=name)


@pytest.fixture
def _mesh_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write_recipe(config: dict[str, Any], table: str = LORA_OF_EXPERTS) -> None:
    """Write a training folder whose recipe has adapters."""
    make_training_folder(config)
    Path("recipe.toml").write_text(Path("recipe.toml").read_text() + table)


@pytest.fixture(scope="module")
def mixtral_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a training folder of Mixtral with a run on one device, `one`."""
    folder = tmp_path_factory.mktemp("mixtral")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_recipe(MIXTRAL)
        train_on_one_device("one")
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("_mesh_dir")
@pytest.mark.parametrize("name", slow_except(list(MESHES), ["experts"]))
def test_adapters_of_experts_do_not_depend_on_the_mesh(name: str, mixtral_folder: Path):
    shutil.copytree(mixtral_folder, ".", dirs_exist_ok=True)
    assert main(train_command("many", *MESHES[name])) == OK
    assert_equal_runs("many", "one")
    tensors = load_file("many-adapter/adapter_model.safetensors")
    saved = {f"base_model.model.{name}.weight" for name in ("model.embed_tokens", "lm_head")}
    assert {name: len(tensors[name]) for name in saved} == dict.fromkeys(saved, 131)
