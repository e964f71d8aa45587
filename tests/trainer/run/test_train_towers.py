"""`prep train` of the text part of a multimodal model: steps without towers, and exports with them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from tests.helpers.fork_server import run_python
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import safetensors_bytes
from tests.helpers.towers import PROCESSOR, write_model
from tests.helpers.training_folder import RECIPE, write_tokenizer

VOCAB = 128
PREFIX = "model.language_model."
TEXT_NAMES = (PREFIX, "lm_head.")
OFFLINE_EXPORT = """
import prepcli as prep
prep.export("runs/recipe", "hf", towers="o/m", offline=True)
"""


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a multimodal model, its init, and a run of three steps."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        write_model("qwen3_vl")
        words = [f"w{number}" for number in range(VOCAB)]
        write_tokenizer(Path("m"), words)
        run_ok("save-init", "./m")
        numbers = np.cumsum(np.random.default_rng(0).integers(0, 3, 1500)) % VOCAB
        Path("text.txt").write_text(" ".join(words[number] for number in numbers))
        recipe = RECIPE.replace("1,2,4", "8,1,1").replace("tiny-init", "m-init")
        Path("recipe.toml").write_text(recipe.replace("steps = 12", "steps = 3"))
        run_ok("train", "recipe.toml")
    return folder


@pytest.fixture
def trained(trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the folder to the working folder of a test."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained_folder, tmp_path, dirs_exist_ok=True)
    return trained_folder


def test_step_records_path_and_digest_of_towers(trained: Path):
    manifest = json.loads(Path("runs/recipe/3/prep-manifest.json").read_text())
    assert manifest["towers"]["path"] == str(trained / "m-init")
    assert len(manifest["towers"]["digest"]) == 32
    assert not any(name.startswith("towers") for name in manifest["leaves"])
    assert all(name.startswith(TEXT_NAMES) for name in manifest["tensors"])


def test_chain_proves_the_text_part_of_a_step(trained: Path):
    run_ok("export", "runs/recipe", "--text-only", "--out", "text")
    link = prep.verify_chain("text").links[0]
    assert (link.status, link.reason) == ("proven", "")


def test_export_of_step_has_towers_of_start_model(trained: Path):
    before = safetensors_bytes(Path("m"))
    run_ok("export", "runs/recipe", "--out", "hf")
    exported = safetensors_bytes(Path("hf"))
    assert exported.keys() == before.keys()
    changed = {name for name in before if exported[name] != before[name]}
    assert changed == {name for name in before if name.startswith(TEXT_NAMES)}
    assert json.loads(Path("hf/config.json").read_text()) == json.loads(
        Path("m/config.json").read_text()
    )
    assert Path("hf", PROCESSOR).read_bytes() == Path("m", PROCESSOR).read_bytes()
    run_ok("verify", "hf")
    verification = prep.verify("hf", "runs/recipe")
    assert verification.is_equal
    assert verification.tensors == len(changed)
    proof = prep.verify_chain("hf")
    assert proof
    assert proof.links[0].status == "holds"
    assert proof.links[0].not_shown == "read from the start model"
    assert proof.links[0].check == f"prep verify hf {trained / 'm-init'}"
    assert f", {len(changed)} tensors, " in proof.links[0].proof
    run_ok("export", "runs/recipe", "--text-only", "--out", "text")
    text = safetensors_bytes(Path("text"))
    assert text == {
        name.replace(PREFIX, "model."): exported[name]
        for name in exported
        if name.startswith(TEXT_NAMES)
    }


def test_verify_of_step_compares_text_part_with_init(
    trained: Path, capsys: pytest.CaptureFixture[str]
):
    manifest = json.loads(Path("m-init/prep-manifest.json").read_text())
    assert main(["verify", "runs/recipe", "m-init"]) == 1
    printed = capsys.readouterr()
    assert "towers of m-init" in printed.err
    assert "ignored: only the text part is compared" in printed.err
    text = {name for name in manifest["tensors"] if name.startswith(TEXT_NAMES)}
    differences = prep.verify("runs/recipe", "m-init").differences
    assert {difference["tensor"] for difference in differences} <= text


@pytest.mark.parametrize("towers", slow_except(["m", "other-mesh"], ["other-mesh"]))
def test_export_reads_towers_of_named_copy(towers: str, trained: Path):
    run_ok("reshard", "m-init", "--mesh", "1,2,1", "--no-scan", "--out", "other-mesh")
    run_ok("export", "runs/recipe", "--out", "a")
    run_ok("export", "runs/recipe", "--towers", f"./{towers}", "--out", "b")
    assert safetensors_bytes(Path("a")) == safetensors_bytes(Path("b"))


def test_other_towers_are_refused(trained: Path, capsys: pytest.CaptureFixture[str]):
    write_model("gemma3", Path("other"))
    capsys.readouterr()
    lines = error_lines(capsys, "export", "runs/recipe", "--towers", "./other")
    assert lines[0] == (
        "error: ./other has other towers than the model of runs/recipe at its start"
    )
    assert "--text-only" in lines[-1]
    shutil.rmtree("other")
    lines = error_lines(capsys, "export", "runs/recipe", "--towers", "./other")
    assert lines[0] == "error: the towers of runs/recipe cannot be read"
    assert not Path("recipe-hf").exists()


@pytest.mark.parametrize("start", slow_except(["m-init", "./m", "runs/recipe"], ["m-init"]))
def test_other_rope_type_is_refused_with_mrope(
    start: str, trained: Path, capsys: pytest.CaptureFixture[str]
):
    scaling = 'rope_scaling = {rope_type = "linear", factor = 2.0}'
    recipe = Path("recipe.toml").read_text().replace("m-init", start)
    Path("rope.toml").write_text(recipe.replace("[model]", f"[model]\n{scaling}"))
    capsys.readouterr()
    lines = error_lines(capsys, "train", "rope.toml")
    assert lines[0] == ("error: `model.rope_scaling` of type linear is not supported for qwen3_vl")
    assert not Path("runs/rope").exists()


def test_override_of_rope_type_is_refused_with_mrope(
    trained: Path, capsys: pytest.CaptureFixture[str]
):
    scaling = 'overrides = {rope_scaling = {rope_type = "yarn", factor = 4.0}}'
    recipe = Path("recipe.toml").read_text()
    Path("rope.toml").write_text(recipe.replace("[model]", f"[model]\n{scaling}"))
    capsys.readouterr()
    lines = error_lines(capsys, "train", "rope.toml")
    assert lines[0] == "error: `model.overrides` of type yarn is not supported for qwen3_vl"
    assert not Path("runs/rope").exists()


def test_towers_on_the_hub_are_not_requested_offline(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with serve_hub({"o/m": FakeRepo({"config.json": b"{}"})}) as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        process = run_python(OFFLINE_EXPORT, cwd=tmp_path, env=environment)
    assert process.returncode != 0
    assert "the towers of runs/recipe cannot be read" in process.stderr
    assert hub.requests == []
