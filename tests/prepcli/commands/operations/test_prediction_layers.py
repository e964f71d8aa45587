"""Multi-token prediction: stored beside the model in every output, and left out by `--text-only` alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.testing.tiny_model import model_logits, tiny_transformer
from tests.helpers.run_cli import error_lines, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import safetensors_bytes, write_safetensors
from tests.helpers.tiny_checkpoints import LLAMA, checkpoint_tensors, read_tensors, write_checkpoint
from tests.helpers.tiny_configs import GOLDEN
from tests.helpers.towers import write_model as write_multimodal_model
from tests.helpers.training_folder import RECIPE, make_training_folder

GLM = GOLDEN["glm4_moe"] | {"num_nextn_predict_layers": 1}
LAYER = f"model.layers.{GLM['num_hidden_layers']}."
# Family -> names of its prediction tensors, as the published files have them.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "glm4_moe": (GLM, (f"{LAYER}eh_proj.weight", f"{LAYER}mlp.experts.0.up_proj.weight")),
    "deepseek_v3": (
        GOLDEN["deepseek_v3"] | {"num_nextn_predict_layers": 1},
        ("model.layers.3.enorm.weight", "model.layers.3.shared_head.head.weight"),
    ),
    "qwen3_next": (
        GOLDEN["qwen3_next"],
        ("mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"),
    ),
    "ernie4_5_moe": (
        GOLDEN["ernie4_5_moe"] | {"num_nextn_predict_layers": 1, "tie_word_embeddings": False},
        ("model.mtp_block.0.self_attn.q_proj.weight", "model.mtp_emb_norm.0.weight"),
    ),
    "mellum": (GOLDEN["mellum"] | {"num_mtp_layers": 1}, ("mtp.fc.weight",)),
}


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_model(config: dict[str, Any], names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Write a model with prediction tensors to the folder `m`, and return all tensors."""
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    rng = np.random.default_rng(0)
    for name in names:
        tensors[name] = rng.standard_normal((3, 5)).astype(np.float32)
    write_checkpoint(Path("m"), config, tensors)
    return read_tensors(Path("m"))


def check_tensors(folder: str, expected: Mapping[str, np.ndarray]) -> None:
    """Check the tensors of a folder, as the safetensors library reads them."""
    tensors = read_tensors(Path(folder))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.tobytes() == expected[name].tobytes(), name


def read_config(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "config.json").read_text())


def read_manifest(checkpoint: str) -> dict[str, Any]:
    return json.loads(Path(checkpoint, "prep-manifest.json").read_text())


def dropped_names(checkpoint: str) -> list[str]:
    return [entry["name"] for entry in read_manifest(checkpoint)["dropped"]]


@pytest.mark.parametrize("name", slow_except(list(CASES), ["glm4_moe", "qwen3_next"]))
def test_prediction_layers_return_in_an_export(name: str):
    config, names = CASES[name]
    tensors = write_model(config, names)
    run_ok("save-init", "./m", "--no-verbatim", "--mesh", "1,2,1")
    run_ok("reshard", "m-init", "--mesh", "1,1,1", "--no-scan", "--out", "other")
    run_ok("export", "other", "--out", "hf")
    check_tensors("hf", tensors)
    assert read_config("hf") == read_config("m")
    for checkpoint in ("m-init", "other", "hf"):
        run_ok("verify", checkpoint)
        run_ok("verify", checkpoint, "./m")
    assert dropped_names("hf") == []


def test_prediction_layers_of_a_wrapped_model_have_no_prefix():
    tensors = write_model(*CASES["qwen3_next"])
    ignored = shutil.ignore_patterns("*.safetensors", "*.index.json")
    shutil.copytree("m", "w", ignore=ignored)
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    Path("w/model.safetensors").write_bytes(safetensors_numpy.save(wrapped))
    run_ok("save-init", "./w", "--out", "init")
    run_ok("export", "init", "--out", "hf")
    check_tensors("hf", tensors)
    run_ok("verify", "init", "./w")


@pytest.mark.parametrize("name", slow_except(list(CASES), ["glm4_moe"]))
def test_text_only_export_states_no_prediction(name: str, capsys: pytest.CaptureFixture[str]):
    config, names = CASES[name]
    tensors = write_model(config, names)
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--text-only", "--out", "text")
    check_tensors("text", {key: value for key, value in tensors.items() if key not in names})
    counts = [key for key in config if key in ("num_nextn_predict_layers", "num_mtp_layers")]
    assert read_config("text") == read_config("m") | dict.fromkeys(counts, 0)
    assert dropped_names("text") == ["towers"]
    capsys.readouterr()
    assert main(["verify", "text", "./m"]) == 0
    err = capsys.readouterr().err
    assert "multi-token prediction of ./m" in err
    assert names[0] in err
    # The output is a model of its own.
    run_ok("save-init", "./text", "--out", "again")


def test_prediction_layers_change_no_logit():
    config, names = CASES["glm4_moe"]
    write_model(config, names)
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--text-only", "--out", "text")
    tokens = {"tokens": np.array([[1, 2, 3]], np.int32)}
    model = tiny_transformer(config).model
    logits = [model_logits(model, prep.load_params(path), tokens) for path in ("m-init", "text")]
    np.testing.assert_array_equal(logits[0], logits[1])


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next"])
def test_verify_names_lost_prediction_layers(name: str, capsys: pytest.CaptureFixture[str]):
    config, names = CASES[name]
    tensors = write_model(config, names)
    run_ok("save-init", "./m")
    kept = {key: value for key, value in tensors.items() if key not in names}
    write_checkpoint(Path("lost"), config, kept)
    for pair in (("./m", "./lost"), ("./lost", "./m"), ("m-init", "./lost")):
        result = prep.verify(*pair)
        assert not result
        differences = {entry["tensor"]: entry["what"] for entry in result.differences}
        assert differences == dict.fromkeys(names, "is not in ./lost")
    fields = run_json(capsys, "verify", "./m", "./lost")
    assert {entry["tensor"] for entry in fields["differences"]} == set(names)


def test_changed_prediction_layer_is_a_difference():
    config, names = CASES["glm4_moe"]
    tensors = write_model(config, names)
    run_ok("save-init", "./m")
    write_checkpoint(Path("changed"), config, tensors | {names[0]: tensors[names[0]] + 1})
    (difference,) = prep.verify("m-init", "./changed").differences
    assert difference["tensor"] == names[0]


def test_pad_vocab_keeps_prediction_layers():
    config, names = CASES["glm4_moe"]
    tensors = write_model(config, names)
    run_ok("pad-vocab", "./m", "--multiple", "64", "--out", "padded")
    padded = read_tensors(Path("padded"))
    assert padded.keys() == tensors.keys()
    assert all(padded[name].tobytes() == tensors[name].tobytes() for name in names)
    run_ok("save-init", "./padded")
    run_ok("export", "m-padded-init", "--out", "hf")
    check_tensors("hf", tensors)


@pytest.mark.parametrize(
    ("command", "again"),
    [("pad-vocab", ("pad-vocab", "--multiple", "1")), ("save-init", ("export",))],
)
def test_dropped_prediction_is_not_in_the_config(command: str, again: tuple[str, ...]):
    config, names = CASES["glm4_moe"]
    tensors = write_model(config, names)
    run_ok(command, "./m", "--drop", f"{LAYER}*", "--out", "out")
    run_ok(*again, "out", "--out", "hf")
    assert read_config("hf")["num_nextn_predict_layers"] == 0
    check_tensors("hf", {name: value for name, value in tensors.items() if name not in names})
    run_ok("verify", "out", "./m")
    assert not prep.verify("out", "./m").settings
    run_ok("verify", "hf", "--chain")


def test_partly_dropped_prediction_stays_in_the_config():
    config, names = CASES["glm4_moe"]
    write_model(config, names)
    run_ok("save-init", "./m", "--drop", names[0])
    run_ok("export", "m-init", "--out", "hf")
    assert read_config("hf")["num_nextn_predict_layers"] == 1


def test_layers_option_removes_prediction_layers():
    config, names = CASES["glm4_moe"]
    write_model(config, names)
    run_ok("save-init", "./m", "--layers", "2")
    assert set(names) < set(dropped_names("m-init"))
    run_ok("export", "m-init", "--out", "hf")
    assert not any(name.startswith(LAYER) for name in read_tensors(Path("hf")))
    assert read_config("hf")["num_nextn_predict_layers"] == 0


def test_export_lists_what_save_init_dropped():
    config = GOLDEN["glm4_moe"]
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors |= {buffer: np.ones(4, np.float32), "model.extra": np.ones(4, np.float32)}
    write_checkpoint(Path("m"), config, tensors)
    run_ok("save-init", "./m", "--drop", "model.extra", "--pad-vocab", "64")
    run_ok("reshard", "m-init", "--mesh", "1,2,1", "--out", "other")
    run_ok("export", "other", "--out", "hf")
    for checkpoint in ("m-init", "other"):
        assert sorted(dropped_names(checkpoint)) == ["model.extra", buffer]
    # Its own rows of padding follow.
    assert sorted(dropped_names("hf")[:2]) == ["model.extra", buffer]
    run_ok("save-init", "./hf", "--out", "again")
    assert sorted(dropped_names("again")) == ["model.extra", buffer]


def test_layout_without_names_for_prediction_is_refused(capsys: pytest.CaptureFixture[str]):
    config, names = CASES["deepseek_v3"]
    write_model(config, names)
    run_ok("save-init", "./m")
    capsys.readouterr()
    lines = error_lines(capsys, "export", "m-init", "--layout", "torchtitan")
    assert lines[0] == (
        "error: layout torchtitan is not supported for models with multi-token prediction"
    )
    assert "--text-only" in lines[-1]
    run_ok("export", "m-init", "--layout", "torchtitan", "--text-only", "--out", "titan")


def test_prediction_layer_of_a_text_part_is_a_tower(capsys: pytest.CaptureFixture[str]):
    """As in the files of GLM-OCR: its text part has one layer more than the config states."""
    tensors = write_multimodal_model("qwen3_vl")
    config = read_config("m")
    layers = config["text_config"]["num_hidden_layers"]
    name = f"model.language_model.layers.{layers}.eh_proj.weight"
    tensors[name] = ("F32", (2, 3), bytes(range(24)))
    write_safetensors(Path("m/model.safetensors"), tensors)
    lines = error_lines(capsys, "save-init", "./m", "--no-verbatim")
    assert name in lines[1]
    config["text_config"]["num_nextn_predict_layers"] = 1
    Path("m/config.json").write_text(json.dumps(config))
    run_ok("save-init", "./m", "--no-verbatim")
    assert read_manifest("m-init")["family"] == "qwen3"
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == tensors
    run_ok("export", "m-init", "--text-only", "--out", "text")
    assert read_config("text")["num_nextn_predict_layers"] == 0
    assert prep.verify("hf", "m-init")


def test_trained_run_exports_prediction_layers():
    make_training_folder()
    tensors = read_tensors(Path("tiny"))
    extra = {"mtp.fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    write_checkpoint(Path("with-mtp"), LLAMA, tensors | extra)
    shutil.copy("tiny/tokenizer.json", "with-mtp")
    run_ok("save-init", "./with-mtp", "--pad-vocab", "8", "--mesh", "1,2,4", "--out", "start")
    recipe = RECIPE.replace("[train]\nsteps = 12", "[train]\nsteps = 1").replace(
        "tiny-init", "start"
    )
    Path("recipe.toml").write_text(recipe)
    run_ok("train", "recipe.toml")
    run_ok("export", "runs/recipe", "--out", "hf")
    exported = read_tensors(Path("hf"))
    assert exported.keys() == tensors.keys() | extra.keys()
    assert exported["mtp.fc.weight"].tobytes() == extra["mtp.fc.weight"].tobytes()
    run_ok("export", "runs/recipe", "--text-only", "--out", "text")
    assert read_tensors(Path("text")).keys() == tensors.keys()
    assert prep.verify("text", "hf")
