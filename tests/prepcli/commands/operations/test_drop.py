"""`--drop`: one rule for all models, and outputs compared with a source of another form."""

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
from tests.helpers.run_cli import Capture, error_lines, run_ok
from tests.helpers.stored_tensors import write_safetensors
from tests.helpers.tiny_checkpoints import (
    GPT_NEO,
    LLAMA,
    checkpoint_tensors,
    make_checkpoint,
    write_checkpoint,
)
from tests.helpers.tiny_configs import GOLDEN
from tests.helpers.towers import write_model

FILE = "model.safetensors"


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


def assert_tensors(folder: str, expected: Mapping[str, np.ndarray]) -> None:
    tensors = load_file(f"{folder}/{FILE}")
    assert tensors.keys() == expected.keys()
    assert all(np.array_equal(tensors[name], values) for name, values in expected.items())


@pytest.mark.parametrize(
    "pattern", ["transformer.h.*.extra.weight", "h.*.extra.weight", "*extra*", "transformer.*"]
)
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
    assert_tensors("hf", tensors)


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
    assert_tensors("hf", tensors)
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "./m", "--verbatim", "--drop", "*", "--out", "none")
    assert lines[0] == "error: `--drop '*'` drops every tensor of ./m"


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_vl"])
def test_drop_of_the_text_part_of_a_multimodal_model(model_type: str, capsys: Capture):
    write_model(model_type)
    prefix = {"gemma3": "language_model.model.", "qwen3_vl": "model.language_model."}[model_type]
    names = [f"{prefix}layers.{number}.self_attn.k_scale" for number in range(2)]
    tensors = add_tensors(dict.fromkeys(names, 1))
    lines = error_lines(capsys, "save-init", "./m", "--no-verbatim")
    pattern = f"{prefix}layers.*.self_attn.k_scale"
    hint = f" hint: `prep save-init --drop '{pattern}'` converts without such tensors"
    assert lines[2] == hint
    run_ok("save-init", "./m", "--no-verbatim", "--drop", pattern)
    assert dropped_names("m-init") == [(name, "--drop") for name in names]
    manifest = read_manifest(Path("m-init")) or NO_MANIFEST
    assert manifest.towers is not None
    run_ok("export", "m-init", "--out", "hf")
    assert_tensors("hf", tensors)
    run_ok("verify", "m-init")
    run_ok("pad-vocab", "./m", "--multiple", "8", "--drop", pattern, "--out", "padded")
    assert load_file(f"padded/{FILE}").keys() == tensors.keys()


def test_drop_of_towers(capsys: Capture):
    write_model("qwen3_vl")
    tensors = add_tensors({"model.visual.blocks.0.attn.q_scale": 1})
    run_ok("save-init", "./m", "--drop", "model.visual.*.q_scale")
    assert dropped_names("m-init") == [("model.visual.blocks.0.attn.q_scale", "--drop")]
    run_ok("export", "m-init", "--out", "hf")
    assert_tensors("hf", tensors)
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "./m", "--drop", "model.language_model.*")
    assert lines[0].endswith("drops nothing of ./m")


def test_drop_is_reported_in_json(capsys: Capture):
    write_model("qwen3_vl")
    add_tensors({"model.visual.blocks.0.attn.q_scale": 1})
    capsys.readouterr()
    run_ok("save-init", "./m", "--drop", "*.q_scale", "--dry-run", "--json")
    accounting = json.loads(capsys.readouterr().out)["accounting"]
    (entry,) = accounting["dropped"]
    assert (entry["name"], entry["rule"]) == ("model.visual.blocks.0.attn.q_scale", "--drop")


# Outputs of `--drop` and `--verbatim`: compared with a source of another form


EXTRA = "model.language_model.layers.0.extra.weight"
NAMES_NOTE = "./m is read under the names in its files: "


def write_model_with_extra_tensor() -> None:
    """Write a multimodal model with a tensor outside of the family of its text part."""
    tensors = write_model("qwen3_vl")
    tensors[EXTRA] = ("F32", (2, 3), bytes(24))
    write_safetensors(Path("m/model.safetensors"), tensors)


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


def test_verify_of_verbatim_and_padded_ignores_padding():
    make_checkpoint(Path("m"))
    run_ok("save-init", "./m", "--verbatim", "--out", "verbatim")
    run_ok("save-init", "./m", "--pad-vocab", "128", "--out", "padded")
    for pair in (("verbatim", "padded"), ("padded", "verbatim")):
        result = prep.verify(*pair)
        assert result
        assert result.ignored_padding_rows == 125


@pytest.mark.parametrize(
    "words", [("pad-vocab", "--multiple", "64"), ("save-init", "--no-verbatim")]
)
def test_verify_opens_the_source_with_recorded_drops(words: tuple[str, ...], capsys: Capture):
    write_model_with_extra_tensor()
    run_ok(words[0], "./m", *words[1:], "--drop", "*extra*", "--out", "out")
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


def test_verify_of_a_text_export_uses_recorded_drops():
    write_model_with_extra_tensor()
    run_ok("save-init", "./m", "--no-verbatim", "--drop", "*extra*")
    run_ok("export", "m-init", "--text-only", "--out", "text")
    result = prep.verify("text", "./m")
    assert result
    assert not result.settings


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


@pytest.mark.parametrize(
    ("config", "name", "recorded", "kind"),
    [
        (
            GOLDEN["glm4_moe"] | {"num_nextn_predict_layers": 1},
            "model.layers.3.eh_proj.weight",
            "model.layers.3.eh_proj.weight",
            "layer",
        ),
        (GOLDEN["qwen3_next"], "mtp.fc.weight", "model.mtp.fc.weight", "module"),
    ],
    ids=["layer", "module"],
)
def test_verify_accepts_predictions_dropped_earlier(
    config: dict[str, Any], name: str, recorded: str, kind: str
):
    """As version 0.1.0 recorded them in its manifest, with the fields of the config unchanged."""
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    write_checkpoint(Path("m"), config, tensors)
    run_ok("save-init", "./m")
    rule = f"{kind} of multi-token prediction, which the model does not run"
    entry = {"name": recorded, "nbytes": 60, "rule": rule, "rows": None}
    with changed_manifest(Path("m-init")) as manifest:
        manifest["dropped"] = [entry]
    tensors[name] = np.ones((3, 5), np.float32)
    shutil.rmtree("m")
    write_checkpoint(Path("m"), config, tensors)
    for pair in (("m-init", "./m"), ("./m", "m-init")):
        result = prep.verify(*pair)
        assert result
        assert not result.settings
        assert [(one["tensor"], one["why"]) for one in result.left_out] == [(name, rule)]


@pytest.fixture
def unrecorded(capsys: Capture) -> str:
    """Write an init, an export of it and, beside them, a source with one more tensor. Return its name."""
    config = GOLDEN["glm4_moe"] | {"num_nextn_predict_layers": 1}
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    write_checkpoint(Path("m"), config, tensors)
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--out", "m-hf")
    name = "model.layers.3.eh_proj.weight"
    tensors[name] = np.ones((3, 5), np.float32)
    shutil.rmtree("m")
    write_checkpoint(Path("m"), config, tensors)
    capsys.readouterr()
    return name


@pytest.mark.parametrize("out", ["m-init", "m-hf"])
def test_verify_accepts_predictions_left_out_unrecorded(out: str, unrecorded: str, capsys: Capture):
    """The version that dropped them wrote the key `dropped` before `tensors`, and no entry in later outputs."""
    with changed_manifest(Path(out)) as manifest:
        manifest["tensors"] = manifest.pop("tensors")
        assert manifest["dropped"] == []
    for pair in ((out, "./m"), ("./m", out)):
        result = prep.verify(*pair)
        assert result
        assert not result.settings
        assert [one["tensor"] for one in result.left_out] == [unrecorded]
        assert not prep.verify(*pair, strict=True)
        assert main(["verify", *pair]) == 0
        notes = [line for line in capsys.readouterr().err.splitlines() if "ignored" in line]
        assert notes == [
            f"multi-token prediction of ./m (60 bytes) ignored: {out} is of an earlier version of prep,"
            " which left it out without a record"
        ]


@pytest.mark.parametrize("out", ["m-init", "m-hf"])
def test_verify_reports_predictions_lost_by_later_versions(out: str, unrecorded: str):
    for pair in ((out, "./m"), ("./m", out)):
        result = prep.verify(*pair)
        assert not result
        assert [difference["tensor"] for difference in result.differences] == [unrecorded]
