"""The option --verbatim for models with a family, and outputs from before their family was known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.models.verbatim import CANNOT_TRAIN
from tests.helpers.run_cli import run_failing, run_json, run_ok
from tests.helpers.stored_tensors import (
    StoredTensor,
    orbax_bytes,
    safetensors_bytes,
    write_safetensors,
)
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_folder import write_tokenizer


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tensors() -> dict[str, StoredTensor]:
    """Write a LLaMA model to `m` and its verbatim init to `old`, and return its tensors."""
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--verbatim", "--mesh", "1,2,2", "--out", "old")
    return safetensors_bytes(Path("m"))


def test_old_output_stays_verbatim_when_its_family_is_known(tensors: dict[str, StoredTensor]):
    expected = {name: data for name, (_, _, data) in tensors.items()}
    assert orbax_bytes(Path("old")) == expected
    run_ok("reshard", "old", "--mesh", "1,4,1", "--out", "new")
    assert json.loads(Path("new/prep-manifest.json").read_text())["family"] == "verbatim"
    assert orbax_bytes(Path("new")) == expected
    for source in ("old", "new"):
        run_ok("export", source, "--out", f"{source}-hf")
        assert safetensors_bytes(Path(f"{source}-hf")) == tensors


def test_export_of_an_old_output_trains_with_its_family(tensors: dict[str, StoredTensor]):
    run_ok("export", "old", "--out", "hf")
    run_ok("save-init", "./hf", "--no-verbatim", "--mesh", "1,2,1", "--out", "init")
    manifest = json.loads(Path("init/prep-manifest.json").read_text())
    assert (manifest["family"], manifest["rules"]) == ("llama", [])
    assert "params.layers.attn.q.weight" in manifest["leaves"]
    run_ok("export", "init", "--out", "again")
    assert safetensors_bytes(Path("again")) == tensors


def test_name_without_the_prefix_is_compared_as_stored(tensors: dict[str, StoredTensor]):
    renamed = {name.replace("model.norm.", "norm."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    Path("mixed").mkdir()
    write_safetensors(Path("mixed/model.safetensors"), renamed)
    shutil.copy("m/config.json", "mixed")
    run_ok("save-init", "./mixed", "--verbatim", "--out", "init")
    run_ok("verify", "init", "./mixed")


@pytest.mark.parametrize(("a", "b"), [("old", "m"), ("old", "init"), ("init", "old"), ("hf", "m")])
def test_verbatim_and_family_outputs_are_equal(tensors: dict[str, StoredTensor], a: str, b: str):
    run_ok("save-init", "./m", "--out", "init")
    run_ok("export", "old", "--out", "hf")
    assert main(["verify", f"./{a}", f"./{b}", "-q"]) == 0
    assert prep.verify(f"./{a}", f"./{b}").tensors == len(tensors)


def test_difference_between_verbatim_and_family_is_found(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--verbatim", "--out", "old")
    path = next(Path("m").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"~")
    assert main(["verify", "old", "./m", "-q"]) == 1
    assert "1 of 30 tensors" in capsys.readouterr().err


def test_refusal_of_a_family_hints_at_verbatim(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"), LLAMA, attention_bias=True)
    config = json.loads(Path("m/config.json").read_text())
    Path("m/config.json").write_text(json.dumps(config | {"attention_bias": False}))
    assert "`--verbatim`" in run_failing(capsys, 1, "save-init", "./m")
    run_ok("save-init", "./m", "--verbatim")
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == safetensors_bytes(Path("m"))


@pytest.mark.parametrize("source", ["old", "old-hf"])
def test_verbatim_checkpoint_is_named_in_json(
    capsys: pytest.CaptureFixture[str], tensors: dict[str, StoredTensor], source: str
):
    run_ok("export", "old", "--out", "old-hf")
    fields = run_json(capsys, "inspect", source)["source"]
    assert (fields["family"], fields["values"]) == ("verbatim", fields["values"])


def test_train_refuses_a_verbatim_checkpoint(
    capsys: pytest.CaptureFixture[str], tensors: dict[str, StoredTensor]
):
    Path("text.txt").write_text("some text\n" * 100)
    recipe = """
[model]
path = "old"
[data]
tokenizer = "words"
path = "text.txt"
type = "text"
seq_length = 16
[train]
steps = 1
[batch]
size = 8
[optimizer]
lr = 1e-3
"""
    Path("recipe.toml").write_text(recipe)
    Path("words").mkdir()
    write_tokenizer(Path("words"))
    error = run_failing(capsys, 1, "train", "recipe.toml")
    assert error.count("error:") == 1
    assert CANNOT_TRAIN in error


def test_names_that_differ_in_case_only_convert():
    tensors: dict[str, StoredTensor] = {
        "Model.w": ("U8", (3,), b"abc"),
        "model.w": ("U8", (3,), b"xyz"),
    }
    Path("m").mkdir()
    write_safetensors(Path("m/model.safetensors"), tensors)
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == tensors


def test_tensor_in_two_files_is_rejected(capsys: pytest.CaptureFixture[str]):
    Path("m").mkdir()
    for number in (1, 2):
        path = Path(f"m/model-0000{number}-of-00002.safetensors")
        write_safetensors(path, {"twice": ("U8", (1,), b"a")})
    assert "twice" in run_failing(capsys, 1, "save-init", "./m")
    assert not Path("m-init").exists()


def test_verbatim_without_effect_is_an_error(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--out", "init")
    for words in (("reshard", "init"), ("export", "init"), ("verify", "init")):
        assert "`--verbatim` has no effect" in run_failing(capsys, 2, *words, "--verbatim")
