"""All multimodal types and architectures of transformers: the same files back."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.testing.tiny_model import model_logits, tiny_transformer
from prepcli.core.errors import PrepError
from prepcli.models.text_part import MROPE_FIELDS, TEXT_FAMILIES, read_text_part
from tests.golden.make_architectures import FOLDER, TYPES, make_model, model_types, read_header
from tests.golden.make_towers import FIRST_TOKEN, compute_logits
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import StoredTensor, safetensors_bytes, write_safetensors
from tests.helpers.towers import model_values

# Types whose text part is computed as a family.
TEXT_TYPES = (
    "audioflamingo3", "deepseek_vl", "deepseek_vl_hybrid", "exaone4_5", "gemma3", "gemma4", "glm46v", "glm4v",
    "glm4v_moe", "glm_ocr", "glmasr", "glmga", "got_ocr2", "granite_docling", "granite_speech",
    "granite_speech_plus", "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "lfm2_vl",
    "lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr",
    "minicpmv4_6", "minicpmv4_7", "mistral3", "moss_transcribe_diarize", "musicflamingo", "ovis2",
    "paddleocr_vl", "pp_chart2table", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_vl",
    "qwen3_5", "qwen3_5_moe", "qwen3_asr", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe",
    "smolvlm", "video_llama_3", "video_llava", "vipllava", "voxtral",
)  # fmt: skip
# Types whose whole model transformers 5.24 does not compute from their file and text alone -> family of the text part.
IMAGE_TYPES = {
    "blip-2": "opt",
    "instructblip": "opt",
    "instructblipvideo": "opt",
    "llama4": "llama4_text",
    "shieldgemma2": "gemma3_text",
}
# Part of the reason -> types that keep the names of their files.
VERBATIM_TYPES = {
    "logit_scale": ("aya_vision", "cohere2_vision"),
    "attend to all": ("paligemma",),
    "which is not supported": ("aria", "blip", "fuyu", "kosmos-2", "mllama", "pix2struct"),
    "has none of text_config": ("git", "idefics", "phi4_multimodal"),
}
LENGTH = 12


@pytest.fixture(autouse=True)
def _work_dir() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


def save_tiny_model(model_type: str) -> dict[str, Any]:
    """Save a tiny model in the folder `m`, with values that distinguish computations, and return its config."""
    from safetensors.numpy import load_file, save_file

    make_model(model_type).save_pretrained("m")
    config = json.loads(Path("m/config.json").read_text())
    _state_mrope(config)
    Path("m/config.json").write_text(json.dumps(config))
    path = Path("m/model.safetensors")
    tensors = load_file(path)
    shapes = {n: e["shape"] for n, e in read_header(path).items() if e["dtype"] == "F32"}
    save_file(tensors | model_values(shapes), path, {"format": "pt"})
    return config


def _state_mrope(config: dict[str, Any]) -> None:
    """Set the sections of M-RoPE, whose defaults are for larger heads."""
    text = config.get("text_config", {})
    rope = text.get("rope_parameters")
    if text.get("model_type") not in TEXT_FAMILIES or not rope:
        return
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    rope[MROPE_FIELDS[0]] = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]


def convert_and_return() -> dict[str, Any]:
    """Convert the folder `m`, compare the export with it, and return the manifest of the init."""
    run_ok("save-init", "./m", "--mesh", "1,1,2")
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == safetensors_bytes(Path("m"))
    assert Path("hf/config.json").read_bytes() == Path("m/config.json").read_bytes()
    return json.loads(Path("m-init/prep-manifest.json").read_text())


# The default tests compare six types by golden files (`test_towers.py`).
@pytest.mark.slow
@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_text_part_equals_whole_model_for_text(model_type: str):
    save_tiny_model(model_type)
    config = convert_and_return()["config"]
    rng = np.random.default_rng(0)
    tokens = rng.integers(FIRST_TOKEN, config["vocab_size"], (2, LENGTH), dtype=np.int32)
    expected = compute_logits(Path("m"), tokens.tolist())
    params = prep.load_params("m-init")
    logits = model_logits(tiny_transformer(config).model, params, {"tokens": tokens})
    print(f"{model_type}: {config['model_type']}, error {np.abs(logits - expected).max():.1e}")
    np.testing.assert_allclose(logits, expected, rtol=2e-6, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "family"), IMAGE_TYPES.items())
def test_text_part_of_other_models_converts(model_type: str, family: str):
    save_tiny_model(model_type)
    assert convert_and_return()["family"] == family


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [(name, reason) for reason, names in VERBATIM_TYPES.items() for name in names],
)
def test_other_types_keep_names_of_file(model_type: str, reason: str):
    config = save_tiny_model(model_type)
    with pytest.raises(PrepError) as caught:
        read_text_part(config, read_header(Path("m/model.safetensors")).keys())
    assert reason in caught.value.why
    assert convert_and_return()["family"] == "verbatim"


# Architectures without a family: names of transformers' checkpoints, there and back, compared byte by byte


ITEMSIZES = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1, "U8": 1}


def random_tensors(types: dict[str, Any]) -> dict[str, StoredTensor]:
    """Return tensors of random bytes with these dtypes and shapes."""
    rng = np.random.default_rng(0)
    tensors: dict[str, StoredTensor] = {}
    for name, (code, shape) in types.items():
        nbytes = int(np.prod(shape)) * ITEMSIZES[code]
        tensors[name] = (code, tuple(shape), rng.bytes(nbytes))
    return tensors


def check_round_trip(model: Path) -> None:
    """Convert a folder, reshard the result, export it, and compare config and tensors with the folder."""
    run_ok("save-init", str(model), "--verbatim", "--mesh", "1,2,2", "--out", "init")
    run_ok("reshard", "init", "--mesh", "1,1,4", "--no-scan", "--out", "other")
    run_ok("export", "other", "--out", "hf")
    assert Path("hf/config.json").read_bytes() == (model / "config.json").read_bytes()


# The other architectures convert by the same rules.
@pytest.mark.parametrize("model_type", slow_except(TYPES, ["mamba2"]))
def test_architecture_round_trips(model_type: str):
    golden = json.loads((FOLDER / f"{model_type}.json").read_text())
    tensors = random_tensors(golden["tensors"])
    Path("m").mkdir()
    write_safetensors(Path("m/model.safetensors"), tensors)
    Path("m/config.json").write_text(json.dumps(golden["config"]))
    check_round_trip(Path("m"))
    assert safetensors_bytes(Path("hf")) == tensors
    manifest = json.loads(Path("other/prep-manifest.json").read_text())
    assert manifest["family"] == "verbatim"


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_type_of_transformers_round_trips(dtype: str, file_format: str):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    converted: list[str] = []
    skipped: dict[str, str] = {}
    for model_type in model_types():
        folder = Path(model_type)
        folder.mkdir()
        with contextlib.chdir(folder):
            try:
                state = _save_model(model_type, dtype)
            except Exception as error:
                skipped[model_type] = f"{type(error).__name__}: {error}"[:200]
            else:
                _check_conversion(state, file_format)
                converted.append(model_type)
        shutil.rmtree(folder)
    print(f"{len(converted)} converted; no tiny model: {json.dumps(skipped, indent=1)}")
    assert len(converted) > 270


def _save_model(model_type: str, dtype: str) -> dict[str, Any]:
    """Save a tiny model with transformers to `expected`, and return its tensors."""
    import torch

    model = make_model(model_type).to(getattr(torch, dtype))
    model.save_pretrained("expected")
    return model.state_dict()


def _check_conversion(state: dict[str, Any], file_format: str) -> None:
    """Convert the model in `expected` there and back, and compare every tensor."""
    import torch

    if file_format == "safetensors":
        check_round_trip(Path("expected"))
        assert safetensors_bytes(Path("hf")) == safetensors_bytes(Path("expected"))
        return
    Path("bin").mkdir()
    shutil.copyfile("expected/config.json", "bin/config.json")
    torch.save(state, "bin/pytorch_model.bin")
    check_round_trip(Path("bin"))
    exported = safetensors_bytes(Path("hf"))
    assert exported.keys() == state.keys()
    for name, tensor in state.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert exported[name][2] == data
