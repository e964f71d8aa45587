"""Granite: LLaMA with a factor each for embeddings, scores, outputs of sublayers, and logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set

MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GraniteConfig."""
    return _llama_style.sizes(config)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, *MULTIPLIERS, "attention_bias", "mlp_bias")
    return scaled_arch_config(config, sizes(config))


def scaled_arch_config(config: HFConfig, axis_sizes: Mapping[str, int]) -> ArchConfig:
    """Return the architecture of LLaMA with Granite's factors.

    Args:
        config: Content of a config.json.
        axis_sizes: Size of each named axis (atom), e.g. `{"embed": 768}`.
    """
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=2048),
        # Without the field the scores are not scaled. In other families they are.
        attn_scale=read_positive(config, "attention_multiplier", 1.0),
        embed_scale=read_positive(config, "embedding_multiplier", 1.0),
        residual_scale=read_positive(config, "residual_multiplier", 1.0),
        # The logits are divided by `logits_scaling`.
        lm_head_input_scale=1 / read_positive(config, "logits_scaling", 1.0),
    )


FAMILY = _llama_style.build_family(
    name="granite",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.gated_mlp(bias=if_set("mlp_bias")),
    },
)
