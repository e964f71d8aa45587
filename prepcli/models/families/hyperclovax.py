"""HyperCLOVA X SEED: Granite with optional norms after each sublayer, and logits times a factor."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _grouped_style, _llama_style, granite
from prepcli.models.parameters import HFConfig, if_set
from prepcli.models.rows import unless_false

HAS_BIAS = if_set("attention_bias")
HAS_POST_NORMS = unless_false("use_post_norm")


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config,
        *ROPE_FIELDS,
        *granite.MULTIPLIERS,
        *("attention_bias", "mlp_bias", "use_post_norm"),
    )
    axis_sizes = granite.sizes(config)
    default_scale = axis_sizes["head_dim"] ** -0.5
    return dataclasses.replace(
        granite.scaled_arch_config(config, axis_sizes),
        attn_scale=read_positive(config, "attention_multiplier", default_scale),
        # Granite divides the logits by this field.
        lm_head_input_scale=read_positive(config, "logits_scaling", 1.0),
        block_type="sandwich" if HAS_POST_NORMS(config) else "pre",
    )


POST_NORMS = _llama_style.rms_norms(attn_post_norm="post_norm1", mlp_post_norm="post_norm2")
FAMILY = _llama_style.build_family(
    name="hyperclovax",
    sizes=granite.sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_grouped_style.under_condition(POST_NORMS, HAS_POST_NORMS),
        **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
        **_llama_style.gated_mlp(bias=if_set("mlp_bias")),
    },
)
