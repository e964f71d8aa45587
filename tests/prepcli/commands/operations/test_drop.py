"""Tensors that outputs drop or keep: `--drop`, and layers for multi-token prediction beside the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.formats.manifest import NO_MANIFEST, read_manifest
from tests.helpers.manifests import changed_manifest
from tests.helpers.run_cli import Capture, error_lines, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import safetensors_bytes, write_safetensors
from tests.helpers.tiny_checkpoints import (
    GPT_NEO,
    LLAMA,
    assert_same,
    checkpoint_tensors,
    make_checkpoint,
    read_tensors,
    write_checkpoint,
)
from tests.helpers.tiny_configs import GOLDEN
from tests.helpers.towers import write_model
from tests.helpers.training_folder import RECIPE, make_training_folder

FILE = "model.safetensors"
GLM = GOLDEN["glm4_moe"] | {"num_nextn_predict_layers": 1}
LAYER = f"model.layers.{GLM['num_hidden_layers']}."


def add_tensors(names: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Add vectors to the model `m`, and return its other tensors."""
    tensors: dict[str, np.ndarray] = {}
    for path in Path("m").glob("*.safetensors*"):
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        path.unlink()
    extra = {name: np.ones(size, np.float32) for name, size in names.items()}
    save_file(tensors | extra, f"m/{FILE}", {"format": "pt"})
    return tensors


def dropped_names(folder: str) -> list[tuple[object, object]]:
    """Return name and rule of each tensor that the manifest records as dropped."""
    manifest = read_manifest(Path(folder)) or NO_MANIFEST
    return [(entry["name"], entry["rule"]) for entry in manifest.dropped]


def check_tensors(folder: str, expected: Mapping[str, np.ndarray]) -> None:
    assert_same(read_tensors(Path(folder)), expected)


@pytest.mark.parametrize("pattern", ["transformer.h.*.extra.weight", "h.*.extra.weight"])
def test_drop_matches_names_with_and_without_prefix(pattern: str):
    make_checkpoint(Path("m"), GPT_NEO)
    name = "transformer.h.1.extra.weight"
    add_tensors({name: 3})
    run_ok("save-init", "./m", "--drop", pattern)
    assert dropped_names("m-init") == [(name, "--drop")]


def test_drop_never_drops_used_tensors(capsys: Capture):
    make_checkpoint(Path("m"), LLAMA)
    lines = error_lines(capsys, "save-init", "./m", "--drop", "*")
    assert lines[0] == "error: `--drop '*'` drops nothing of ./m"
    tensors = add_tensors({"model.extra": 3})
    run_ok("save-init", "./m", "--drop", "*")
    assert dropped_names("m-init") == [("model.extra", "--drop")]
    run_ok("export", "m-init", "--out", "hf")
    check_tensors("hf", tensors)


def test_pad_vocab_drops_buffers_of_the_family():
    """Without the option it copies them."""
    make_checkpoint(Path("m"), LLAMA)
    names = [f"model.layers.{number}.self_attn.rotary_emb.inv_freq" for number in range(3)]
    add_tensors(dict.fromkeys(names, 4))
    run_ok("pad-vocab", "./m", "--multiple", "8", "--out", "all")
    assert load_file(f"all/{FILE}").keys() >= {*names}
    run_ok("pad-vocab", "./m", "--multiple", "8", "--drop", "*.inv_freq", "--out", "padded")
    assert load_file(f"padded/{FILE}").keys().isdisjoint(names)
    assert dropped_names("padded") == [(name, "--drop") for name in names]


def test_drop_of_verbatim_checkpoints(capsys: Capture):
    make_checkpoint(Path("m"), LLAMA)
    tensors = add_tensors({"a.scale": 3, "b.scale": 4})
    run_ok("save-init", "./m", "--verbatim", "--drop", "*.scale")
    assert dropped_names("m-init") == [("a.scale", "--drop"), ("b.scale", "--drop")]
    run_ok("export", "m-init", "--out", "hf")
    check_tensors("hf", tensors)
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "./m", "--verbatim", "--drop", "*", "--out", "none")
    assert lines[0] == "error: `--drop '*'` drops every tensor of ./m"


@pytest.mark.slow
def test_drop_of_the_text_part_of_a_multimodal_model(capsys: Capture):
    write_model("gemma3")
    names = [f"language_model.model.layers.{number}.self_attn.k_scale" for number in range(2)]
    tensors = add_tensors(dict.fromkeys(names, 1))
    lines = error_lines(capsys, "save-init", "./m", "--no-verbatim")
    pattern = "language_model.model.layers.*.self_attn.k_scale"
    assert lines[2] == f" hint: `prep save-init --drop '{pattern}'` converts without such tensors"
    run_ok("save-init", "./m", "--no-verbatim", "--drop", pattern)
    assert dropped_names("m-init") == [(name, "--drop") for name in names]
    run_ok("export", "m-init", "--out", "hf")
    check_tensors("hf", tensors)
    run_ok("pad-vocab", "./m", "--multiple", "8", "--drop", pattern, "--out", "padded")
    assert load_file(f"padded/{FILE}").keys() == tensors.keys()


def test_drop_of_towers(capsys: Capture):
    write_model("qwen3_vl")
    name = "model.visual.blocks.0.attn.q_scale"
    tensors = add_tensors({name: 1})
    words = ("save-init", "./m", "--drop", "model.visual.*.q_scale")
    (entry,) = run_json(capsys, *words, "--dry-run")["accounting"]["dropped"]
    assert (entry["name"], entry["rule"]) == (name, "--drop")
    run_ok(*words)
    assert dropped_names("m-init") == [(name, "--drop")]
    run_ok("export", "m-init", "--out", "hf")
    check_tensors("hf", tensors)
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "./m", "--drop", "model.language_model.*")
    assert lines[0].endswith("drops nothing of ./m")


# Outputs of `--drop` and `--verbatim`: compared with a source of another form


EXTRA = "model.language_model.layers.0.extra.weight"
NAMES_NOTE = "./m is read under the names in its files: "


def write_model_with_extra_tensor() -> None:
    """Write a multimodal model with a tensor outside of the family of its text part."""
    tensors = write_model("qwen3_vl")
    tensors[EXTRA] = ("F32", (2, 3), bytes(24))
    write_safetensors(Path("m/model.safetensors"), tensors)


@pytest.mark.slow
def test_verify_of_verbatim_and_multimodal_has_equal_settings():
    write_model("qwen3_vl")
    run_ok("save-init", "./m", "--verbatim", "--out", "verbatim")
    for pair in (("verbatim", "./m"), ("./m", "verbatim")):
        result = prep.verify(*pair)
        assert result
        assert not result.settings
    edited = json.loads(Path("m/config.json").read_text())
    edited["text_config"]["rope_theta"] = 1.0
    Path("m/config.json").write_text(json.dumps(edited))
    (setting,) = prep.verify("verbatim", "./m").settings
    assert setting["key"] == "text_config.rope_theta"


@pytest.mark.slow
def test_verify_of_verbatim_and_padded_ignores_padding():
    make_checkpoint(Path("m"))
    run_ok("save-init", "./m", "--verbatim", "--out", "verbatim")
    run_ok("save-init", "./m", "--pad-vocab", "128", "--out", "padded")
    for pair in (("verbatim", "padded"), ("padded", "verbatim")):
        result = prep.verify(*pair)
        assert result
        assert result.ignored_padding_rows == 125


def test_verify_opens_the_source_with_recorded_drops(capsys: Capture):
    write_model_with_extra_tensor()
    run_ok("pad-vocab", "./m", "--multiple", "64", "--drop", "*extra*", "--out", "out")
    for pair in (("out", "./m"), ("./m", "out")):
        result = prep.verify(*pair)
        assert result
        assert not result.settings
        assert [(entry["tensor"], entry["why"]) for entry in result.left_out] == [(EXTRA, "--drop")]
    capsys.readouterr()
    for more in (("./m",), ("--chain",)):
        assert main(["verify", "out", *more]) == 0
        assert NAMES_NOTE not in capsys.readouterr().err
    assert main(["save-init", "./m", "--out", "verbatim"]) == 0
    run_ok("verify", "verbatim", "./m")
    assert NAMES_NOTE in capsys.readouterr().err


def test_fallback_to_verbatim_names_the_reason(capsys: Capture):
    write_model_with_extra_tensor()
    why = f"{EXTRA} is not part of family qwen3"
    assert main(["save-init", "./m"]) == 0
    err = capsys.readouterr().err
    assert f"./m is read under the names in its files: {why}" in err.splitlines()
    lines = error_lines(capsys, "export", "./m", "--text-only", "--out", "text")
    assert lines[1] == f"  why: {why}"
    assert main(["save-init", "./m", "--verbatim", "--out", "verbatim"]) == 0
    assert main(["reshard", "m-init", "--mesh", "1,1,1", "--out", "again"]) == 0
    assert main(["save-init", "./m", "--drop", "*extra*", "--out", "dropped"]) == 0
    assert why not in capsys.readouterr().err


def test_verify_accepts_predictions_dropped_earlier():
    """As version 0.1.0 recorded them in its manifest, with the fields of the config unchanged."""
    name = f"{LAYER}eh_proj.weight"
    tensors = checkpoint_tensors(GLM, "float32", tied=False, legacy=False)
    write_checkpoint(Path("m"), GLM, tensors)
    run_ok("save-init", "./m")
    rule = "layer of multi-token prediction, which the model does not run"
    with changed_manifest(Path("m-init")) as manifest:
        manifest["dropped"] = [{"name": name, "nbytes": 60, "rule": rule, "rows": None}]
    tensors[name] = np.ones((3, 5), np.float32)
    shutil.rmtree("m")
    write_checkpoint(Path("m"), GLM, tensors)
    for pair in (("m-init", "./m"), ("./m", "m-init")):
        result = prep.verify(*pair)
        assert result
        assert not result.settings
        assert [(one["tensor"], one["why"]) for one in result.left_out] == [(name, rule)]


@pytest.mark.slow
@pytest.mark.parametrize("out", ["m-init", "m-hf"])
def test_verify_accepts_predictions_left_out_unrecorded(out: str, capsys: Capture):
    """The version that dropped them wrote the key `dropped` before `tensors`, and no entry in later outputs."""
    tensors = checkpoint_tensors(GLM, "float32", tied=False, legacy=False)
    write_checkpoint(Path("m"), GLM, tensors)
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--out", "m-hf")
    name = f"{LAYER}eh_proj.weight"
    shutil.rmtree("m")
    write_checkpoint(Path("m"), GLM, tensors | {name: np.ones((3, 5), np.float32)})
    for pair in ((out, "./m"), ("./m", out)):
        differences = prep.verify(*pair).differences
        assert [difference["tensor"] for difference in differences] == [name]
    with changed_manifest(Path(out)) as manifest:
        manifest["tensors"] = manifest.pop("tensors")
        assert manifest["dropped"] == []
    capsys.readouterr()
    for pair in ((out, "./m"), ("./m", out)):
        result = prep.verify(*pair)
        assert result
        assert not result.settings
        assert [one["tensor"] for one in result.left_out] == [name]
        assert not prep.verify(*pair, strict=True)
        assert main(["verify", *pair]) == 0
        notes = [line for line in capsys.readouterr().err.splitlines() if "ignored" in line]
        assert notes == [
            f"multi-token prediction of ./m (60 bytes) ignored: {out} is of an earlier version of prep,"
            " which left it out without a record"
        ]


# Layers for multi-token prediction: kept beside the model in every output, and dropped with their settings

# Family -> names of its prediction tensors, as the published files have them.
PREDICTION_CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
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


def write_prediction(config: dict[str, Any], names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Write a model with prediction tensors to the folder `m`, and return all tensors."""
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    rng = np.random.default_rng(0)
    for name in names:
        tensors[name] = rng.standard_normal((3, 5)).astype(np.float32)
    write_checkpoint(Path("m"), config, tensors)
    return read_tensors(Path("m"))


def read_config(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "config.json").read_text())


def read_recorded(checkpoint: str) -> dict[str, Any]:
    return json.loads(Path(checkpoint, "prep-manifest.json").read_text())


def dropped_prediction(checkpoint: str) -> list[str]:
    return [entry["name"] for entry in read_recorded(checkpoint)["dropped"]]


@pytest.mark.parametrize("name", slow_except(list(PREDICTION_CASES), ["glm4_moe"]))
def test_prediction_layers_return_in_an_export(name: str):
    config, names = PREDICTION_CASES[name]
    tensors = write_prediction(config, names)
    run_ok("save-init", "./m", "--no-verbatim", "--mesh", "1,2,1")
    run_ok("reshard", "m-init", "--mesh", "1,1,1", "--no-scan", "--out", "other")
    run_ok("export", "other", "--out", "hf")
    check_tensors("hf", tensors)
    assert read_config("hf") == read_config("m")
    for checkpoint in ("m-init", "other", "hf"):
        run_ok("verify", checkpoint)
        run_ok("verify", checkpoint, "./m")
    assert dropped_prediction("hf") == []


def test_prediction_layers_of_a_wrapped_model_have_no_prefix():
    tensors = write_prediction(*PREDICTION_CASES["qwen3_next"])
    ignored = shutil.ignore_patterns("*.safetensors", "*.index.json")
    shutil.copytree("m", "w", ignore=ignored)
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    save_file(wrapped, "w/model.safetensors")
    run_ok("save-init", "./w", "--out", "init")
    run_ok("export", "init", "--out", "hf")
    check_tensors("hf", tensors)
    run_ok("verify", "init", "./w")


@pytest.mark.parametrize("name", slow_except(list(PREDICTION_CASES), ["glm4_moe"]))
def test_text_only_export_states_no_prediction(name: str, capsys: Capture):
    config, names = PREDICTION_CASES[name]
    tensors = write_prediction(config, names)
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--text-only", "--out", "text")
    check_tensors("text", {key: value for key, value in tensors.items() if key not in names})
    counts = [key for key in config if key in ("num_nextn_predict_layers", "num_mtp_layers")]
    assert read_config("text") == read_config("m") | dict.fromkeys(counts, 0)
    assert dropped_prediction("text") == ["towers"]
    capsys.readouterr()
    assert main(["verify", "text", "./m"]) == 0
    err = capsys.readouterr().err
    assert "multi-token prediction of ./m" in err
    assert names[0] in err
    # The output is a model of its own.
    run_ok("save-init", "./text", "--out", "again")


@pytest.mark.parametrize("name", slow_except(["glm4_moe", "qwen3_next"], ["qwen3_next"]))
def test_verify_names_lost_prediction_layers(name: str, capsys: Capture):
    config, names = PREDICTION_CASES[name]
    tensors = write_prediction(config, names)
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
    config, names = PREDICTION_CASES["glm4_moe"]
    tensors = write_prediction(config, names)
    run_ok("save-init", "./m")
    write_checkpoint(Path("changed"), config, tensors | {names[0]: tensors[names[0]] + 1})
    (difference,) = prep.verify("m-init", "./changed").differences
    assert difference["tensor"] == names[0]


@pytest.mark.parametrize(
    ("command", "again"),
    slow_except(
        [("pad-vocab", ("pad-vocab", "--multiple", "1")), ("save-init", ("export",))],
        [("pad-vocab", ("pad-vocab", "--multiple", "1"))],
    ),
)
def test_dropped_prediction_is_not_in_the_config(command: str, again: tuple[str, ...]):
    config, names = PREDICTION_CASES["glm4_moe"]
    tensors = write_prediction(config, names)
    run_ok(command, "./m", "--drop", f"{LAYER}*", "--out", "out")
    run_ok(*again, "out", "--out", "hf")
    assert read_config("hf")["num_nextn_predict_layers"] == 0
    check_tensors("hf", {name: value for name, value in tensors.items() if name not in names})
    run_ok("verify", "out", "./m")
    assert not prep.verify("out", "./m").settings
    run_ok("verify", "hf", "--chain")


@pytest.mark.slow
def test_partly_dropped_prediction_stays_in_the_config():
    config, names = PREDICTION_CASES["glm4_moe"]
    write_prediction(config, names)
    run_ok("save-init", "./m", "--drop", names[0])
    run_ok("export", "m-init", "--out", "hf")
    assert read_config("hf")["num_nextn_predict_layers"] == 1


@pytest.mark.slow
def test_layers_option_removes_prediction_layers():
    config, names = PREDICTION_CASES["glm4_moe"]
    write_prediction(config, names)
    run_ok("save-init", "./m", "--layers", "2")
    assert set(names) < set(dropped_prediction("m-init"))
    run_ok("export", "m-init", "--out", "hf")
    assert not any(name.startswith(LAYER) for name in read_tensors(Path("hf")))
    assert read_config("hf")["num_nextn_predict_layers"] == 0


@pytest.mark.slow
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
        assert sorted(dropped_prediction(checkpoint)) == ["model.extra", buffer]
    # Its own rows of padding follow.
    assert sorted(dropped_prediction("hf")[:2]) == ["model.extra", buffer]
    run_ok("save-init", "./hf", "--out", "again")
    assert sorted(dropped_prediction("again")) == ["model.extra", buffer]


def test_layout_without_names_for_prediction_is_refused(capsys: Capture):
    config, names = PREDICTION_CASES["deepseek_v3"]
    write_prediction(config, names)
    run_ok("save-init", "./m")
    capsys.readouterr()
    lines = error_lines(capsys, "export", "m-init", "--layout", "torchtitan")
    assert lines[0] == (
        "error: layout torchtitan is not supported for models with multi-token prediction"
    )
    assert "--text-only" in lines[-1]
    run_ok("export", "m-init", "--layout", "torchtitan", "--text-only", "--out", "titan")


@pytest.mark.slow
def test_prediction_layer_of_a_text_part_is_a_tower(capsys: Capture):
    """As in the files of GLM-OCR: its text part has one layer more than the config states."""
    tensors = write_model("qwen3_vl")
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
    assert read_recorded("m-init")["family"] == "qwen3"
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
