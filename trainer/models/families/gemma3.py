"""Gemma 3, its text model: Gemma 2 with norms of queries and keys; layers with a window rotate otherwise."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer.models.architecture import (
    LAYER_TYPES,
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    read_sliding_windows,
    read_softcap,
    reject_unsupported_fields,
)
from trainer.models.families import _llama_style
from trainer.models.parameters import HFConfig, read_size
from trainer.models.rope_config import Rope, read_layer_rope

ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")


def sizes(config: HFConfig) -> dict[str, int]:
    """Atom -> extent; Gemma3TextConfig's defaults where a field is absent."""
    return _llama_style.sizes(config, vocab=262208, embed=2304, mlp=9216, layers=26, heads=8, kv_heads=4, head_dim=256)


def arch_config(config: HFConfig) -> ArchConfig:
    """What its layers compute; PrepError where the config asks for something else."""
    known = ("final_logit_softcapping", "rope_local_base_freq", "sliding_window_pattern", "query_pre_attn_scalar")
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "layer_types", "sliding_window", *known)
    found = sizes(config)
    every = read_size(config, "sliding_window_pattern", 6)  # not `_sliding_window_pattern`, which nothing reads
    window = config.get("sliding_window", 4096)
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            found,
            131072,
            rope=_read_rope(config, LAYER_TYPES[0], config.get("rope_theta", 1e6)),
            activation=ACTIVATION,
        ),
        norm="rms_offset",
        block_type="sandwich",
        embed_scale=found["embed"] ** 0.5,
        attn_scale=read_positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        sliding_windows=read_sliding_windows(config, found["layers"], window, lambda layer: (layer + 1) % every != 0),
        local_rope=_read_rope(config, LAYER_TYPES[1], config.get("rope_local_base_freq", 1e4)),
        final_logit_softcap=read_softcap(config, "final_logit_softcapping", None),
    )


def _read_rope(config: HFConfig, kind: str, theta: Any) -> Rope:
    positions = read_size(config, "max_position_embeddings", 131072)
    return read_layer_rope(config, kind, LAYER_TYPES, theta, sizes(config)["head_dim"], positions)


FAMILY = _llama_style.build_family(
    name="gemma3_text",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **_llama_style.SANDWICH_NORMS,
        **_llama_style.attention(bias="attention_bias", out_bias="attention_bias"),
        **_llama_style.QK_NORMS,
        **_llama_style.gated_mlp(),
    },
)
