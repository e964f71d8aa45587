"""Quantised multimodal models: decoded text parts are those of their family, and the quantised bytes come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import prepcli as prep
from tests.helpers.run_cli import run_ok
from tests.helpers.stored_tensors import StoredTensor, safetensors_bytes, write_safetensors
from tests.helpers.towers import write_model

FAMILIES = {"llava": "llama", "qwen3_vl": "qwen3"}
BLOCK = 16


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read_json(path: str) -> dict[str, Any]:
    return json.loads(Path(path).read_text())


def quantize(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return random fp8 codes, and the scales of their blocks."""
    codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    grid = tuple(-(-size // BLOCK) for size in shape)
    scales = np.exp(rng.normal(-4, 0.5, grid)).astype(np.float32)
    return codes, scales


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    rows, columns = codes.shape
    spread = np.repeat(np.repeat(scales, BLOCK, axis=0), BLOCK, axis=1)[:rows, :columns]
    return (codes.astype(np.float32) * spread).astype(ml_dtypes.bfloat16)


def write_quantized(
    model_type: str,
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Write the model `m` with projections in fp8, and return its tensors and the decoded ones."""
    original = write_model(model_type)
    rng = np.random.default_rng(0)
    stored: dict[str, StoredTensor] = {}
    decoded: dict[str, StoredTensor] = {}
    for name, (code, shape, data) in original.items():
        if len(shape) != 2 or not name.endswith("proj.weight"):
            stored[name] = decoded[name] = (code, shape, data)
            continue
        codes, scales = quantize(rng, shape)
        stored[name] = ("F8_E4M3", shape, codes.tobytes())
        stored[f"{name}_scale_inv"] = ("F32", scales.shape, scales.tobytes())
        decoded[name] = ("BF16", shape, decode(codes, scales).tobytes())
    write_safetensors(Path("m/model.safetensors"), stored)
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    config = read_json("m/config.json") | {"quantization_config": settings}
    Path("m/config.json").write_text(json.dumps(config))
    return stored, decoded


@pytest.mark.parametrize("model_type", FAMILIES)
def test_decoded_text_part_has_its_family(model_type: str):
    _, decoded = write_quantized(model_type)
    run_ok("save-init", "./m", "--quantized", "dequantize", "--mesh", "1,2,2")
    assert read_json("m-init/prep-manifest.json")["family"] == FAMILIES[model_type]
    run_ok("export", "m-init", "--quantized", "dequantize", "--out", "values")
    assert safetensors_bytes(Path("values")) == decoded
    config = read_json("m/config.json")
    del config["quantization_config"]
    assert read_json("values/config.json") == config
    run_ok("verify", "m-init")
    run_ok("verify", "m-init", "./m")
    run_ok("verify", "./m", "m-init")
    run_ok("verify", "m-init", "values")


@pytest.mark.parametrize("options", [[], ["--quantized-source", "./m"]])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_export_of_multimodal_model_has_quantised_bytes(model_type: str, options: list[str]):
    stored, _ = write_quantized(model_type)
    run_ok("save-init", "./m", "--quantized", "dequantize", "--pad-vocab", "100")
    run_ok("export", "m-init", *options, "--out", "hf")
    assert safetensors_bytes(Path("hf")) == stored
    assert read_json("hf/config.json") == read_json("m/config.json")


@pytest.mark.parametrize("extra", ["", "model.language_model.layers.0.self_attn.extra"])
def test_decoded_wrapped_multimodal_model_verifies(extra: str):
    stored, decoded = write_quantized("qwen3_vl")
    prefixed = {f"_orig_mod.{name}": tensor for name, tensor in stored.items()}
    drop: tuple[str, ...] = ()
    if extra:
        prefixed[f"_orig_mod.{extra}"] = ("F32", (3,), bytes(12))
        drop = ("--drop", "*.extra")
    write_safetensors(Path("m/model.safetensors"), prefixed)
    run_ok("save-init", "./m", "--quantized", "dequantize", *drop)
    assert read_json("m-init/prep-manifest.json")["family"] == "qwen3"
    run_ok("export", "m-init", "--quantized", "dequantize", "--out", "values")
    assert safetensors_bytes(Path("values")) == decoded
    run_ok("verify", "m-init", "./m")
    run_ok("verify", "./m", "m-init")
    run_ok("save-init", "./m", "--quantized", "keep", *drop, "--out", "kept")
    run_ok("verify", "kept", "./m")


def test_text_only_export_of_decoded_model_writes_values():
    _, decoded = write_quantized("qwen3_vl")
    run_ok("save-init", "./m", "--quantized", "dequantize")
    prep.export("m-init", "text", text_only=True)
    prefix = "model.language_model."
    assert safetensors_bytes(Path("text")) == {
        name.replace(prefix, "model."): tensor
        for name, tensor in decoded.items()
        if name.startswith((prefix, "lm_head."))
    }
    assert read_json("text/config.json")["model_type"] == "qwen3"


def test_first_layers_of_decoded_text_part_keep_towers():
    stored, _ = write_quantized("llava")
    run_ok("save-init", "./m", "--quantized", "dequantize", "--layers", "1")
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == {
        name: tensor
        for name, tensor in stored.items()
        if not name.startswith("language_model.model.layers.") or ".layers.0." in name
    }


def test_verbatim_keeps_names_of_decoded_multimodal_model():
    stored, _ = write_quantized("llava")
    run_ok("save-init", "./m", "--quantized", "dequantize", "--verbatim")
    assert read_json("m-init/prep-manifest.json")["family"] == "verbatim"
    run_ok("verify", "m-init", "./m")
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == stored


def test_load_params_reads_decoded_text_part():
    _, decoded = write_quantized("llava")
    run_ok("save-init", "./m", "--quantized", "dequantize")
    params = prep.load_params("m-init")
    embedding = decoded["language_model.model.embed_tokens.weight"]
    assert np.asarray(params["embed"]["tokens"]).tobytes() == embedding[2]
