"""Youtu-LLM: LLaMA with the latent attention of DeepSeek-V3."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _deepseek_style, _llama_style
from prepcli.models.parameters import HFConfig


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of YoutuConfig."""
    axis_sizes = _llama_style.sizes(
        config, vocab=128256, embed=2048, mlp=6144, heads=16, kv_heads=16
    )
    return {**axis_sizes, **_deepseek_style.latent_sizes(config, axis_sizes)}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, *_deepseek_style.LATENT_FIELDS)
    axis_sizes = sizes(config)
    # The default of YoutuConfig, 2 / sqrt(5 width), and twice as much for embeddings.
    default_std = 2.0 / (5.0 * axis_sizes["embed"]) ** 0.5
    std = read_positive(config, "initializer_range", default_std)
    embedding_std = read_positive(config, "embedding_initializer_range", 2.0 * std)
    return dataclasses.replace(
        _deepseek_style.latent_arch_config(
            config,
            axis_sizes,
            max_positions=131072,
            is_interleaved=bool(config.get("rope_interleave", True)),
        ),
        init_std=std,
        leaf_init_stds=(("embed.tokens", embedding_std),),
    )


FAMILY = _llama_style.build_family(
    name="youtu",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **_llama_style.PRE_NORMS,
        **_deepseek_style.latent_attention(),
        **_llama_style.gated_mlp(),
    },
)
