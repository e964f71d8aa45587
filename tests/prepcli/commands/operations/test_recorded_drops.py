"""Outputs of `--drop` and `--verbatim`: compared with a source of another form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from tests.helpers.manifests import changed_manifest
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.stored_tensors import write_safetensors
from tests.helpers.tiny_checkpoints import checkpoint_tensors, make_checkpoint, write_checkpoint
from tests.helpers.tiny_configs import GOLDEN
from tests.helpers.towers import write_model

EXTRA = "model.language_model.layers.0.extra.weight"

NAMES_NOTE = "./m is read under the names in its files: "


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
def test_verify_opens_the_source_with_recorded_drops(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
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


def test_fallback_to_verbatim_names_the_reason(capsys: pytest.CaptureFixture[str]):
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
def unrecorded(capsys: pytest.CaptureFixture[str]) -> str:
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
def test_verify_accepts_predictions_left_out_unrecorded(
    out: str, unrecorded: str, capsys: pytest.CaptureFixture[str]
):
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
