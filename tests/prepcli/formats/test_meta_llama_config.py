"""Tests of converting params.json of the published models to their config.json on the Hub."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.formats.meta_llama_config import is_small_llama_3_2, to_hf_config
from prepcli.models.registry import FAMILIES

FIRST = {
    "dim": 4096,
    "multiple_of": 256,
    "n_heads": 32,
    "n_layers": 32,
    "norm_eps": 1e-06,
    "vocab_size": -1,
}
THIRD = {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 1024,
    "ffn_dim_multiplier": 1.3, "norm_eps": 1e-05, "rope_theta": 500000.0,
}  # fmt: skip
SCALED = THIRD | {"use_scaled_rope": True}
MODELS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {  # params, vocabulary size, expected fields
    "7B": (FIRST, 32000, {"intermediate_size": 11008, "max_position_embeddings": 2048, "num_key_value_heads": 32}),
    "13B": (FIRST | {"dim": 5120, "n_heads": 40, "n_layers": 40}, 32000, {"intermediate_size": 13824}),
    "30B": (FIRST | {"dim": 6656, "n_heads": 52, "n_layers": 60}, 32000, {"intermediate_size": 17920}),
    "65B": (
        FIRST | {"dim": 8192, "n_heads": 64, "n_layers": 80, "norm_eps": 1e-05}, 32000,
        {"intermediate_size": 22016, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    ),
    "2 7B": (FIRST | {"norm_eps": 1e-05}, 32000, {"intermediate_size": 11008, "max_position_embeddings": 4096}),
    "2 70B": (
        {"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_heads": 64, "n_kv_heads": 8, "n_layers": 80,
         "norm_eps": 1e-05, "vocab_size": -1}, 32000,
        {"intermediate_size": 28672, "max_position_embeddings": 4096, "num_key_value_heads": 8, "eos_token_id": 2},
    ),
    "Code 7B": (
        FIRST | {"norm_eps": 1e-05, "rope_theta": 1000000}, 32016,
        {"rope_theta": 1000000.0, "max_position_embeddings": 16384, "vocab_size": 32016},
    ),
    "3 8B": (
        THIRD, 128256,
        {"intermediate_size": 14336, "max_position_embeddings": 8192, "rope_theta": 500000.0, "bos_token_id": 128000},
    ),
    "3 70B": (
        THIRD | {"dim": 8192, "n_layers": 80, "n_heads": 64, "multiple_of": 4096}, 128256, {"intermediate_size": 28672},
    ),
    "3.1 8B": (SCALED, 128256, {"max_position_embeddings": 131072, "tie_word_embeddings": False}),
    "3.1 405B": (
        SCALED | {"dim": 16384, "n_layers": 126, "n_heads": 128, "ffn_dim_multiplier": 1.2, "multiple_of": 4096},
        128256, {"intermediate_size": 53248, "eos_token_id": 128001},
    ),
    "3.2 1B": (
        SCALED | {"dim": 2048, "n_layers": 16, "ffn_dim_multiplier": 1.5, "multiple_of": 256}, 128256,
        {"intermediate_size": 8192, "tie_word_embeddings": True, "num_attention_heads": 32},
    ),
    "3.2 3B": (
        SCALED | {"dim": 3072, "n_layers": 28, "n_heads": 24, "ffn_dim_multiplier": 1.0, "multiple_of": 256}, 128256,
        {"intermediate_size": 8192},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("params", "vocab", "expected"), MODELS.values(), ids=MODELS)
def test_to_hf_config_matches_published_configs(
    params: dict[str, Any], vocab: int, expected: dict[str, Any]
) -> None:
    config = to_hf_config(params, vocab, is_small_llama_3_2(params))
    assert {key: config[key] for key in expected} == expected
    assert to_hf_config({"model": params}, vocab, False) == config | {"tie_word_embeddings": False}
    renamed_keys = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
    }
    assert {key: config[key] for key in renamed_keys} == {
        key: params[meta_key] for key, meta_key in renamed_keys.items()
    }
    assert config["model_type"] == "llama"
    assert FAMILIES["llama"].arch_config(config).max_positions == config["max_position_embeddings"]


def test_to_hf_config_derives_rope_scaling() -> None:
    factors = {
        name: to_hf_config(MODELS[name][0], 128256, False)["rope_scaling"]
        for name in ("3.1 8B", "3.2 1B")
    }
    common_fields = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert factors["3.1 8B"] == common_fields | {"rope_type": "llama3", "factor": 8.0}
    assert factors["3.2 1B"] == common_fields | {"rope_type": "llama3", "factor": 32.0}
    scaled = to_hf_config(SCALED | {"rope_scaling_factor": 16}, 128256, False)["rope_scaling"]
    assert isinstance(scaled, dict)
    assert scaled["factor"] == 16.0
    assert "rope_scaling" not in to_hf_config(THIRD, 128256, False)


BROKEN = {
    "a list": ([], "not a JSON object"),
    "a list one level down": ({"model": []}, "not a JSON object"),
    "another model": (
        FIRST | {"sliding_window": 4096, "moe": {}},
        "it has moe, sliding_window, which LLaMA",
    ),
    "no width": ({key: value for key, value in FIRST.items() if key != "dim"}, "dim is None"),
    "a negative width": (FIRST | {"dim": -1}, "dim is -1"),
    "an endless width": (FIRST | {"dim": 2**40}, "dim is 1099511627776"),
    "a width of True": (FIRST | {"dim": True}, "dim is True"),
    "a width that heads do not divide": (FIRST | {"n_heads": 33}, "for each of 33 heads"),
    "heads of odd width": (FIRST | {"dim": 96}, "for each of 32 heads"),
    "no heads": (FIRST | {"n_heads": 0}, "n_heads is 0"),
    "key heads that are a text": (FIRST | {"n_kv_heads": "8"}, "n_kv_heads is '8'"),
    "no norm": (
        {key: value for key, value in FIRST.items() if key != "norm_eps"},
        "norm_eps is None",
    ),
    "an infinite factor": (
        FIRST | {"ffn_dim_multiplier": float("inf")},
        "ffn_dim_multiplier is inf",
    ),
    "a large factor": (FIRST | {"ffn_dim_multiplier": 1e300}, "must be at most 1000"),
    "a multiple of nothing": (FIRST | {"multiple_of": 0}, "multiple_of is 0"),
    "a base below 0": (FIRST | {"rope_theta": -1.0}, "rope_theta is -1.0"),
}


@pytest.mark.parametrize(("params", "why"), BROKEN.values(), ids=BROKEN)
def test_to_hf_config_rejects_invalid_params(params: Any, why: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        to_hf_config(params, 32000, False)
    assert why in str(caught.value)
