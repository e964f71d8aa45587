"""GLM-4 of 2025 (`glm4`): GLM with norms before and after each sublayer."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ArchConfig
from prepcli.models.families import _llama_style, glm
from prepcli.models.parameters import HFConfig


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    return dataclasses.replace(glm.arch_config(config), block_type="sandwich")


FAMILY = _llama_style.build_family(
    name="glm4",
    sizes=glm.sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.rms_norms(
            attn_norm="input_layernorm",
            attn_post_norm="post_self_attn_layernorm",
            mlp_norm="post_attention_layernorm",
            mlp_post_norm="post_mlp_layernorm",
        ),
        **_llama_style.attention(bias=glm.HAS_QKV_BIAS),
        **_llama_style.FUSED_GATED_MLP,
    },
)
