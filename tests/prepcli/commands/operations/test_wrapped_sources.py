"""Quantised, multimodal and verbatim models with the prefix of a wrapper on all names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.run_cli import exported_tensors, run_failing, run_ok
from tests.helpers.stored_tensors import write_safetensors
from tests.helpers.tiny_checkpoints import LLAMA, assert_same, make_checkpoint, read_tensors
from tests.helpers.towers import write_model

PREFIX = "_orig_mod."


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def wrap(prefix: str = PREFIX) -> None:
    """Write a folder `w` with the tensors of `m` under prefixed names in one file."""
    shutil.copytree("m", "w", ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors = read_tensors(Path("m"))
    save_file({prefix + name: value for name, value in tensors.items()}, "w/model.safetensors")


def write_wrapped_model(extra: str = "", *, prefix: str = PREFIX) -> set[str]:
    """Write a multimodal model to `m`, and with a prefix and an extra tensor to `w`. Return its names."""
    tensors = write_model("qwen3_vl", Path("m"))
    shutil.copytree("m", "w")
    prefixed = {prefix + name: tensor for name, tensor in tensors.items()}
    if extra:
        prefixed[prefix + extra] = ("F32", (3,), bytes(12))
    write_safetensors(Path("w/model.safetensors"), prefixed)
    return set(tensors)


def test_dequantized_wrapped_model_verifies() -> None:
    values = make_quantized(Path("m"), "gptq")
    wrap()
    run_ok("save-init", "./w", "--quantized", "dequantize", "--out", "init")
    run_ok("export", "init", "--quantized", "dequantize", "--out", "exported")
    expected = {name: value.astype(ml_dtypes.bfloat16) for name, value in values.items()}
    assert_same(read_tensors(Path("exported")), expected)
    run_ok("verify", "init", "./w")
    run_ok("verify", "init", "./m")
    run_ok("save-init", "./w", "--quantized", "keep", "--out", "kept")
    run_ok("verify", "kept", "init")
    run_ok("verify", "init", "kept")


def test_lock_of_a_wrapped_multimodal_model_has_file_names() -> None:
    write_wrapped_model()
    run_ok("lock", "./w", "--out", "w.lock")
    locked = json.loads(Path("w.lock").read_text())["tensors"]
    assert locked.keys() == load_file("w/model.safetensors").keys()
    run_ok("save-init", "./w", "--lock", "w.lock", "--out", "init")


def test_recorded_drop_of_a_wrapped_verbatim_output() -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    Path("w").mkdir()
    shutil.copy("m/config.json", "w")
    prefixed = {PREFIX + name: value for name, value in tensors.items()}
    prefixed[PREFIX + "head.weight"] = np.zeros(3, np.float32)
    save_file(prefixed, "w/model.safetensors")
    drop = ("--drop", "_orig_mod.head.*")
    run_ok("save-init", "./w", "--verbatim", *drop, "--out", "verbatim")
    run_ok("verify", "verbatim", "./w")
    run_ok("save-init", "./w", *drop, "--out", "init")
    run_ok("verify", "init", "./w")


def test_inspect_of_a_wrapped_multimodal_model(capsys: pytest.CaptureFixture[str]) -> None:
    write_wrapped_model()
    reports: list[str] = []
    for folder in ("m", "w"):
        assert main(["inspect", f"./{folder}"]) == 0
        reports.append(capsys.readouterr().out)
    assert "139,968" in reports[0]
    assert "139,968" in reports[1]
    assert "not the tensors" not in reports[1]
    # A tensor of the towers has the same leaf.
    tower = next(name for name in load_file("m/model.safetensors") if ".visual." in name)
    drawings: list[str] = []
    for folder in ("m", "w"):
        run_ok("inspect", f"./{folder}", "--shards", f"towers.{tower}", "--mesh", "1,1,1")
        drawings.append(capsys.readouterr().out.replace(f"./{folder}", ""))
    assert drawings[0] == drawings[1]


@pytest.mark.parametrize("pattern", ["*.k_scale", "_orig_mod.*.k_scale"])
def test_drop_of_a_wrapped_multimodal_model(pattern: str) -> None:
    names = write_wrapped_model("model.language_model.layers.0.self_attn.k_scale")
    run_ok("save-init", "./w", "--drop", pattern, "--out", "init")
    assert exported_tensors("init").keys() == names
    run_ok("verify", "init", "./w")
    run_ok("verify", "./w", "init")
    run_ok("save-init", "./w", "--drop", pattern, "--verbatim", "--out", "verbatim")
    run_ok("verify", "verbatim", "./w")
    run_ok("verify", "verbatim", "init")


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_text_only_export_after_drop_verifies(prefix: str) -> None:
    extra = "model.language_model.layers.0.self_attn.k_scale"
    names = write_wrapped_model(extra, prefix=prefix)
    run_ok("save-init", "./w", "--drop", "*.k_scale", "--out", "init")
    run_ok("export", "init", "--text-only", "--out", "text")
    text = "model.language_model."
    expected = {
        name.replace(text, "model.") for name in names if name.startswith((text, "lm_head."))
    }
    assert read_tensors(Path("text")).keys() == expected
    run_ok("verify", "text", "./w")
    run_ok("verify", "./w", "text")
    links = prep.verify_chain("text").links
    assert [link.status for link in links] == ["proven", "proven"]
    assert links[0].proof.startswith("manifest, 47 tensors, ")
    assert links[0].changed.startswith("left out: towers, ")
    path = Path("text/model.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-4] + bytes(byte ^ 1 for byte in data[-4:]))
    assert main(["verify", "text", "./w", "-q"]) == 1
    assert main(["verify", "--chain", "text", "-q"]) == 1


def test_partly_wrapped_names_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    Path("w").mkdir()
    shutil.copy("m/config.json", "w")
    prefixed: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        prefixed[name if name == "lm_head.weight" else PREFIX + name] = value
    save_file(prefixed, "w/model.safetensors")
    error = run_failing(capsys, 1, "save-init", "./w", "--out", "init")
    assert "some names begin with `_orig_mod.`" in error
    assert "config.json and the weights" not in error
