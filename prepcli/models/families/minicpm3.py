"""MiniCPM3: latent attention with factors for embeddings, outputs of sublayers, and the head's input."""

from __future__ import annotations

import dataclasses
import math

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _deepseek_style, _llama_style
from prepcli.models.parameters import HFConfig, if_set, read_size


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of MiniCPM3Config."""
    axis_sizes = _llama_style.sizes(
        config, vocab=73448, embed=2560, mlp=6400, layers=62, heads=40, kv_heads=40
    )
    latent_sizes = _deepseek_style.latent_sizes(
        config,
        axis_sizes,
        kv_rank=256,
        q_rank=768,
        key_dim=64,
        value_dim=axis_sizes["embed"] // axis_sizes["heads"],
        rope_dim=32,
    )
    return {**axis_sizes, **latent_sizes}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *ROPE_FIELDS, *("kv_lora_rank", "q_lora_rank", "attention_bias", "mlp_bias")
    )
    axis_sizes = sizes(config)
    embed = axis_sizes["embed"]
    # A null stands for no factor, an absent field for the factor of MiniCPM3-4B.
    depth = math.sqrt(axis_sizes["layers"])
    depth_scale = read_positive(config, "scale_depth", depth if "scale_depth" in config else 1.4)
    base_width = read_size(config, "dim_model_base", embed if "dim_model_base" in config else 256)
    return dataclasses.replace(
        _deepseek_style.latent_arch_config(
            config, axis_sizes, max_positions=32768, is_interleaved=False
        ),
        norm_eps=read_positive(config, "rms_norm_eps", 1e-5),
        init_std=read_positive(config, "initializer_range", 0.1),
        embed_scale=read_positive(config, "scale_emb", 12),
        residual_scale=depth_scale / depth,
        lm_head_input_scale=base_width / embed,
    )


FAMILY = _llama_style.build_family(
    name="minicpm3",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **_llama_style.PRE_NORMS,
        **_deepseek_style.latent_attention(),
        **_llama_style.gated_mlp(bias=if_set("mlp_bias")),
    },
)
