"""Conversions of Mistral's own checkpoints: `consolidated.safetensors` with Meta's names, and `params.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from prepcli.commands.cli.main import main
from tests.helpers.run_cli import exported_tensors, run_json, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, assert_same, make_checkpoint
from tests.helpers.torch_checkpoints import META_LAYER_NAMES

# The heads are wider than hidden_size / heads, as in Mistral Nemo.
CONFIG: dict[str, Any] = LLAMA | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "head_dim": 8,
    "sliding_window": 16,
}
PARAMS = {
    "dim": 32, "n_layers": 3, "head_dim": 8, "hidden_dim": 48, "n_heads": 8, "n_kv_heads": 4, "norm_eps": 1e-05,
    "vocab_size": 131, "rope_theta": 1000000.0, "sliding_window": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def native_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors with Mistral's names, and the rows of queries and keys in pairs of neighbours.

    This is the inverse of `permute_for_rope` of transformers.
    """
    native: dict[str, np.ndarray] = {}
    outer = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "output.weight",
    }
    for name, value in tensors.items():
        if name in outer:
            native[outer[name]] = value
            continue
        _, _, layer, rest = name.split(".", 3)
        heads = {"self_attn.q_proj.weight": 8, "self_attn.k_proj.weight": 4}.get(rest)
        if heads:
            pairs = value.reshape(heads, 2, 4, 32).transpose(0, 2, 1, 3)
            value = np.ascontiguousarray(pairs.reshape(value.shape))
        native[f"layers.{layer}.{META_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"] = value
    return native


def write_native(**changes: Any) -> dict[str, np.ndarray]:
    """Write a folder `w` with Mistral's files, and return the tensors of Hugging Face."""
    tensors = make_checkpoint(Path("m"), CONFIG)
    Path("w").mkdir()
    save_file(native_tensors(tensors), Path("w/consolidated.safetensors"))
    Path("w/params.json").write_text(json.dumps(PARAMS | changes))
    Path("w/tekken.json").write_text("{}")
    return tensors


def test_native_mistral_converts_to_the_hf_model() -> None:
    tensors = write_native()
    run_ok("save-init", "./w", "--out", "init")
    assert_same(exported_tensors("init"), tensors)
    config = json.loads(Path("exported/config.json").read_text())
    expected = {key: CONFIG[key] for key in CONFIG if key in config and not key.endswith("_id")}
    expected |= {"rope_theta": 1000000.0, "max_position_embeddings": 32768}
    assert {key: config[key] for key in expected} == expected
    assert Path("exported/tekken.json").exists()
    assert not Path("exported/params.json").exists()
    run_ok("verify", "init", "./w")


def test_config_of_native_mistral_loads_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    write_native(sliding_window=None)
    run_ok("pad-vocab", "./w", "--size", "131", "--out", "hf")
    config = transformers.AutoConfig.from_pretrained("hf")
    assert (config.model_type, config.head_dim, config.sliding_window) == ("mistral", 8, None)
    assert config.rope_parameters["rope_theta"] == 1000000.0


def test_native_mistral_with_its_config_is_converted() -> None:
    tensors = write_native()
    Path("w/config.json").write_text(json.dumps(CONFIG))
    run_ok("save-init", "./w", "--out", "init")
    assert_same(exported_tensors("init"), tensors)


def test_native_file_beside_the_hf_model_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = write_native()
    for name in ("consolidated.safetensors", "params.json"):
        Path("m", name).write_bytes(Path("w", name).read_bytes())
    assert main(["save-init", "./m", "--out", "init"]) == 0
    error = capsys.readouterr().err
    assert "left out: consolidated.safetensors (other weights)" in error
    assert_same(exported_tensors("init"), tensors)


@pytest.mark.parametrize("changes", [{"moe": {"num_experts": 8}}, {"vision_encoder": {}}])
def test_other_models_of_mistral_keep_their_names(changes: dict[str, Any]) -> None:
    tensors = write_native(**changes)
    run_ok("save-init", "./w", "--out", "init")
    assert_same(exported_tensors("init"), native_tensors(tensors))


def test_verbatim_keeps_the_names_of_mistral(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = write_native()
    run_ok("save-init", "./w", "--verbatim", "--out", "init")
    assert_same(exported_tensors("init"), native_tensors(tensors))
    assert run_json(capsys, "inspect", "./w")["source"]["format"] == "meta"
