"""GGUF files as sources, compared with the loader of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import prepcli as prep
from prepcli.errors import DamagedError, PrepError
from tests.helpers.gguf_files import CONFIGS, make_gguf
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import read_tensors

gguf = lazy_module("gguf")
torch = lazy_module("torch")
transformers = lazy_module("transformers")
gguf_loading = lazy_module("transformers.modeling_gguf_pytorch_utils")
TYPES = ("Q8_0", "Q4_0", "F16", "BF16", "F32", "Q4_K", "Q6_K")


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def convert(**options: Any) -> dict[str, np.ndarray]:
    """Decode `m.gguf`, and return the tensors of an export."""
    prep.save_init("./m.gguf", "init", quantized="dequantize", **options)
    prep.export("init", "exported")
    return read_tensors(Path("exported"))


def transformers_tensors() -> dict[str, np.ndarray]:
    """Return the tensors that transformers loads from `m.gguf`, with one tensor per expert."""
    parsed = gguf_loading.load_gguf_checkpoint("m.gguf", return_tensors=False)["config"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            # The default of Phi-3 is a token beyond this vocabulary.
            transformers.AutoConfig.for_model(**{**parsed, "pad_token_id": None})
        )
    loaded = gguf_loading.load_gguf_checkpoint("m.gguf", return_tensors=True, model_to_load=model)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in loaded["tensors"].items():
        array = tensor.numpy()
        if not name.endswith((".gate_up_proj", ".experts.down_proj")):
            tensors[name] = array
            continue
        prefix = name.rpartition(".")[0]
        for expert, matrix in enumerate(array):
            if name.endswith("gate_up_proj"):
                gate, up = np.split(matrix, 2)
                tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate
                tensors[f"{prefix}.{expert}.up_proj.weight"] = up
            else:
                tensors[f"{prefix}.{expert}.down_proj.weight"] = matrix
    return tensors


CASES = [(name, kind) for name in CONFIGS for kind in TYPES]
FAST = (
    [(name, "Q8_0") for name in CONFIGS] + [("llama", kind) for kind in TYPES] + [("gpt2", "Q4_0")]
)


@pytest.mark.parametrize(("architecture", "type_name"), slow_except(CASES, [*dict.fromkeys(FAST)]))
def test_values_equal_transformers(architecture: str, type_name: str):
    if architecture == "gpt2" and type_name in ("Q4_K", "Q6_K"):
        pytest.skip("random blocks may overflow")
    make_gguf(Path("m.gguf"), architecture, type_name)
    tensors = convert(dtype="float32")
    expected = transformers_tensors()
    assert {*tensors} == {*expected}
    for name, array in expected.items():
        assert tensors[name].shape == array.shape, name
        assert np.array_equal(tensors[name], array.astype(np.float32)), name


@pytest.mark.parametrize("architecture", CONFIGS)
def test_config_equals_transformers(architecture: str):
    make_gguf(Path("m.gguf"), architecture)
    convert()
    config = transformers.AutoConfig.from_pretrained("exported")
    parsed = gguf_loading.load_gguf_checkpoint("m.gguf")["config"]
    expected = transformers.AutoConfig.for_model(**parsed)
    fields = ("num_hidden_layers", "hidden_size", "num_attention_heads", "model_type")
    for field in (*fields, "tie_word_embeddings"):
        assert getattr(config, field) == getattr(expected, field), field
    original = CONFIGS[architecture]
    fields = ("vocab_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "intermediate_size")
    for field in (*fields, "max_position_embeddings", "n_positions"):
        if field in original:
            assert getattr(config, field) == original[field], field


def test_default_is_bfloat16():
    make_gguf(Path("m.gguf"), "llama", "Q4_0")
    tensors = convert(mesh="1,2,2")
    expected = transformers_tensors()
    for name, array in expected.items():
        assert np.array_equal(tensors[name], array.astype(ml_dtypes.bfloat16)), name


def test_config_option_replaces_metadata():
    make_gguf(Path("m.gguf"), "llama")
    Path("c").mkdir()
    config = {**CONFIGS["llama"], "rope_theta": 7.0, "tie_word_embeddings": False}
    Path("c/config.json").write_text(json.dumps(config))
    convert(config="c")
    assert json.loads(Path("exported/config.json").read_text())["rope_theta"] == 7.0


def rewrite(pattern: bytes, replacement: bytes) -> None:
    """Replace bytes of `m.gguf` by as many others."""
    content = Path("m.gguf").read_bytes()
    changed = re.sub(re.escape(pattern), replacement, content, count=1)
    assert len(changed) == len(content) != 0
    assert changed != content
    Path("m.gguf").write_bytes(changed)


@pytest.mark.parametrize(
    ("pattern", "replacement", "error", "message"),
    [
        (b"llama", b"xlama", PrepError, "architecture 'xlama'"),
        (b"token_embd.weight", b"token_emxx.weight", DamagedError, "no `token_embd.weight`"),
        (b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight", PrepError, "blk.1.ffn_xx.weight"),
    ],
)
def test_unknown_architecture_or_tensor_is_named(
    pattern: bytes, replacement: bytes, error: type[PrepError], message: str
):
    make_gguf(Path("m.gguf"), "llama")
    rewrite(pattern, replacement)
    with pytest.raises(error, match=re.escape(message)):
        convert()
    assert not Path("init").exists()


def test_scaled_rotary_embedding_requires_config():
    make_gguf(Path("m.gguf"), "llama", extra={"rope_freqs.weight": np.ones(32, np.float32)})
    with pytest.raises(PrepError, match="factors of a scaled rotary embedding"):
        convert()
    assert not Path("init").exists()


def test_type_that_is_not_decoded_is_named():
    make_gguf(Path("m.gguf"), "llama", "IQ4_NL")
    with pytest.raises(PrepError, match=r"type IQ4_NL of `token_embd\.weight` is not"):
        convert()


def test_number_of_experts_is_limited():
    experts = {"blk.2.ffn_up_exps.weight": np.zeros((20_000, 1, 1), np.float32)}
    make_gguf(Path("m.gguf"), "qwen3moe", extra=experts)
    with pytest.raises(DamagedError, match="has 20,000 experts"):
        convert()


def test_gguf_without_option_is_refused():
    make_gguf(Path("m.gguf"), "llama")
    for call in (lambda: prep.save_init("./m.gguf", "init"), lambda: prep.inspect("./m.gguf")):
        with pytest.raises(PrepError, match="is in GGUF format"):
            call()
