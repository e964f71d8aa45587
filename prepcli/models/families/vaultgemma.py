"""VaultGemma: Gemma 2 without norms after the sublayers."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ArchConfig
from prepcli.models.families import _llama_style, gemma2
from prepcli.models.parameters import HFConfig, if_set


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    return dataclasses.replace(gemma2.arch_config(config), block_type="pre")


FAMILY = _llama_style.build_family(
    name="vaultgemma",
    sizes=gemma2.sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **_llama_style.rms_norms(attn_norm="input_layernorm", mlp_norm="pre_feedforward_layernorm"),
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.gated_mlp(),
    },
)
