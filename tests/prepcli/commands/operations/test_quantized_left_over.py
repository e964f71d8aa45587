"""Quantisation settings beside dense tensors: the tensors decide, and the outputs do not claim quantisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import DamagedError, UsageError
from prepcli.sources.detect import may_be_quantized
from tests.helpers.quantized_folders import FORMATS
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import LLAMA, checkpoint_tensors, read_tensors, write_checkpoint

REMARK = "the quantisation in config.json is ignored: no tensor is quantised"


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_left_over(name: str, **further: np.ndarray) -> dict[str, Any]:
    """Write a dense model `m` with the settings of a format, and return its config without them."""
    config = {**LLAMA, "torch_dtype": "float32", "tie_word_embeddings": False}
    tensors = {**checkpoint_tensors(LLAMA, "float32", False, False), **further}
    settings = {"quantization_config": dict(FORMATS[name].settings)}
    write_checkpoint(Path("m"), {**config, **settings}, tensors)
    return config


def read_config(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "config.json").read_text())


@pytest.mark.parametrize("name", ["fp8", "compressed-int4", "gptq", "nf4"])
def test_left_over_config_is_ignored(name: str, capsys: pytest.CaptureFixture[str]):
    config = make_left_over(name)
    assert main(["save-init", "./m", "--out", "init"]) == 0
    assert capsys.readouterr().err.count(REMARK) == 1
    manifest = json.loads(Path("init/prep-manifest.json").read_text())
    assert manifest["family"] == "llama"
    assert "quantization" not in manifest
    prep.export("init", "exported")
    assert "quantization_config" not in read_config("exported")
    assert read_config("exported")["hidden_size"] == config["hidden_size"]
    stored = read_tensors(Path("m"))
    exported = read_tensors(Path("exported"))
    assert {key: array.tobytes() for key, array in stored.items()} == {
        key: array.tobytes() for key, array in exported.items()
    }
    assert prep.verify("init", against="./m")


def test_left_over_config_is_dropped_from_verbatim_output(capsys: pytest.CaptureFixture[str]):
    make_left_over("fp8")
    Path("m/quantize_config.json").write_text('{"bits": 4}')
    assert main(["save-init", "./m", "--verbatim", "--out", "init"]) == 0
    both = "the quantisation in config.json and quantize_config.json is ignored: no tensor"
    assert both in capsys.readouterr().err
    prep.export("init", "exported")
    assert "quantization_config" not in read_config("exported")
    assert not Path("exported/quantize_config.json").exists()


def test_unused_quantization_config_is_noted_and_has_nothing_to_decode(
    capsys: pytest.CaptureFixture[str],
):
    make_left_over("awq")
    with pytest.raises(UsageError, match=f"has no effect.*not quantised .{REMARK}"):
        prep.save_init("./m", "init", quantized="dequantize")
    run_ok("inspect", "./m")
    captured = capsys.readouterr()
    assert REMARK in captured.out
    assert REMARK not in captured.err


def test_left_over_config_does_not_refuse_model(capsys: pytest.CaptureFixture[str]):
    make_left_over("gptq")
    assert main(["export", "./m", "--dtype", "bfloat16", "--out", "exported"]) == 0
    assert capsys.readouterr().err.count(REMARK) == 1
    assert "quantization_config" not in read_config("exported")


def test_left_over_config_beside_torch_files_is_ignored():
    torch = pytest.importorskip("torch")
    make_left_over("gptq")
    tensors = {key: torch.tensor(array) for key, array in read_tensors(Path("m")).items()}
    Path("torch").mkdir()
    Path("m/config.json").rename("torch/config.json")
    torch.save(tensors, "torch/pytorch_model.bin")
    prep.export("./torch", "exported")
    assert "quantization_config" not in read_config("exported")


def test_dense_weights_with_scales_are_not_decoded():
    """Whether a script multiplied the weights with the scales that it left is unknown."""
    scale = {"model.layers.0.self_attn.q_proj.weight_scale_inv": np.ones((1, 1), np.float32)}
    make_left_over("fp8", **scale)
    with pytest.raises(DamagedError, match=r"config\.json and the tensors disagree") as caught:
        prep.save_init("./m", "init", quantized="dequantize")
    assert "`model.layers.0.self_attn.q_proj.weight_scale_inv` is a scale" in caught.value.why
    assert not Path("init").exists()


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("layers.0.q_proj.weight", "float8_e4m3fn", True),
        ("layers.0.experts.gate_up_proj", "float8_e4m3fn", True),
        ("layers.0.q_proj.W_q", "uint8", True),
        ("layers.0.q_proj.weight_scale", "float32", True),
        ("layers.0.experts.gate_up_proj_scale_inv", "bfloat16", True),
        ("layers.0.q_proj.weight", "bfloat16", False),
        ("logit_scale", "float32", False),
        ("layer_scale.scale", "float32", False),
        ("h.0.attn.bias", "uint8", False),
        ("h.0.attn.mask", "bool", False),
        ("embeddings.position_ids", "int64", False),
    ],
)
def test_name_and_dtype_show_quantised_tensor(name: str, dtype: str, expected: bool):
    assert may_be_quantized(name, dtype) is expected
