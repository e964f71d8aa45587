"""OLMo 1: LLaMA with layer norms without parameters, and optional bounds of queries, keys and values."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    NO_CLIP,
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set

# OlmoLayerNorm of transformers has it. No config field sets it.
NORM_EPS = 1e-5


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of OlmoConfig."""
    return _llama_style.sizes(config, vocab=50304)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "clip_qkv")
    clip = NO_CLIP
    if config.get("clip_qkv") is not None:
        clip = read_positive(config, "clip_qkv", NO_CLIP)
    return dataclasses.replace(
        _llama_style.arch_config(config, sizes(config), max_positions=2048),
        norm="layer",
        norm_eps=NORM_EPS,
        qkv_clip=clip,
    )


FAMILY = _llama_style.build_family(
    name="olmo",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.gated_mlp(),
    },
    final_norm={},
)
