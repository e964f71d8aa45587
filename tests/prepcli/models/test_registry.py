"""Errors that name the mechanism that an unsupported family needs."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.models.registry import (
    FAMILIES,
    MECHANISMS,
    NEW_LAYER_HINT,
    family_of,
    missing_mechanism,
)


@pytest.mark.parametrize(
    ("config", "mechanism"),
    [
        ({"model_type": "zamba2", "state_size": 16}, "state-space layers"),
        ({"model_type": "zamba", "mamba_d_state": 16}, "state-space layers"),
        ({"model_type": "rwkv"}, "recurrent layers"),
        ({"model_type": "deepseek_v32", "n_routed_experts": 256}, "sparse attention"),
        ({"model_type": "minimax", "num_experts": 32}, "linear attention"),
        ({"model_type": "dbrx"}, "a sparse MoE"),
        ({"model_type": "llava", "vision_config": {}}, "an image, video or audio encoder"),
        ({"model_type": "bert", "type_vocab_size": 2}, "an encoder without a decoder"),
        ({"model_type": "bart"}, "cross attention other than T5's"),
        ({"model_type": "new", "index_topk": 2048}, "sparse attention"),
        ({"model_type": "new", "vision_config": {"depth": 3}}, "an image, video or audio encoder"),
        ({"model_type": ["mamba"], "ssm_state_size": 8}, "state-space layers"),
    ],
)
def test_error_names_missing_mechanism(config: dict[str, Any], mechanism: str) -> None:
    with pytest.raises(PrepError) as caught:
        family_of(config)
    assert caught.value.why.startswith(f"it needs {mechanism}")
    assert caught.value.hint == NEW_LAYER_HINT


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "new"},
        {"model_type": "new", "alibi": True},
        {"model_type": "new", "kv_lora_rank": None, "type_vocab_size": 0},
        {},
    ],
)
def test_missing_mechanism_is_empty_for_unknown_family(config: dict[str, Any]) -> None:
    assert missing_mechanism(config) == ""


def test_mechanisms_exclude_supported_families() -> None:
    model_types = [name for types, _ in MECHANISMS.values() for name in types.split()]
    assert len(model_types) == len(set(model_types))
    assert not set(model_types) & set(FAMILIES)
