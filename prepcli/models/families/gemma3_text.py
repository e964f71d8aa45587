"""Gemma 3 (text model): Gemma 2 with QK norms, no attention softcap, and local rotary embeddings in sliding layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from prepcli.models.architecture import (
    LAYER_TYPES,
    ROPE_FIELDS,
    ArchConfig,
    is_in_window_pattern,
    read_positive,
    read_sliding_windows,
    read_softcap,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style
from prepcli.models.levanter_layouts import levanter_layouts
from prepcli.models.maxtext_gemma_layouts import maxtext_gemma3_layouts
from prepcli.models.orbax_layouts import tunix_gemma_layout
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rope_config import Rope, read_layer_rope

ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Gemma3TextConfig."""
    return _llama_style.sizes(
        config, vocab=262208, embed=2304, mlp=9216, layers=26, heads=8, kv_heads=4, head_dim=256
    )


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    gemma_fields = (
        "final_logit_softcapping",
        "rope_local_base_freq",
        "sliding_window_pattern",
        "query_pre_attn_scalar",
    )
    reject_unsupported_fields(
        config, *ROPE_FIELDS, "attention_bias", "layer_types", "sliding_window", *gemma_fields
    )
    axis_sizes = sizes(config)
    window = config.get("sliding_window", 4096)
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            axis_sizes,
            max_positions=131072,
            rope=_read_rope(config, LAYER_TYPES[0], config.get("rope_theta", 1e6)),
            activation=ACTIVATION,
        ),
        norm="rms_offset",
        block_type="sandwich",
        embed_scale=axis_sizes["embed"] ** 0.5,
        attn_scale=read_positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        # With a pattern of 6, layers 0 to 4 slide, layer 5 has full attention, 6 to 10 slide, and so on.
        # Transformers never reads `_sliding_window_pattern`.
        sliding_windows=read_sliding_windows(
            config,
            axis_sizes["layers"],
            window,
            lambda layer: is_in_window_pattern(config, layer, default=6),
        ),
        local_rope=_read_rope(config, LAYER_TYPES[1], config.get("rope_local_base_freq", 1e4)),
        final_logit_softcap=read_softcap(config, "final_logit_softcapping", None),
    )


def _read_rope(config: HFConfig, layer_type: str, theta: Any) -> Rope:
    max_positions = read_size(config, "max_position_embeddings", 131072)
    return read_layer_rope(
        config,
        layer_type,
        layer_types=LAYER_TYPES,
        theta=theta,
        head_dim=sizes(config)["head_dim"],
        max_positions=max_positions,
    )


FAMILY = _llama_style.build_family(
    name="gemma3_text",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **_llama_style.SANDWICH_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.QK_NORMS,
        **_llama_style.gated_mlp(),
    },
    layouts=lambda parameters: {
        **maxtext_gemma3_layouts(parameters, sizes),
        **tunix_gemma_layout(parameters, sizes, post_attention_norm="post_attention_norm"),
        **levanter_layouts(parameters),
    },
)
