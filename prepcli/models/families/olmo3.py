"""OLMo 3: OLMo 2 with a sliding window in three of four layers, and a rotary embedding per layer type."""

from __future__ import annotations

import dataclasses
from typing import Any

from prepcli.models.architecture import (
    LAYER_TYPES,
    ROPE_FIELDS,
    ArchConfig,
    read_sliding_windows,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style, olmo2
from prepcli.models.levanter_layouts import levanter_layouts
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rope_config import Rope, read_layer_rope

DEFAULT_THETA = 500_000.0


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *ROPE_FIELDS, "attention_bias", "layer_types", "sliding_window"
    )
    axis_sizes = olmo2.sizes(config)
    windows = read_sliding_windows(
        config,
        axis_sizes["layers"],
        config.get("sliding_window", 4096),
        lambda layer: (layer + 1) % 4 != 0,
    )
    # `rope_theta` of version 4 belongs to full attention, as in Olmo3Config.
    full_rope = _read_rope(config, LAYER_TYPES[0], config.get("rope_theta", DEFAULT_THETA))
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            axis_sizes,
            max_positions=2048,
            rope=full_rope,
            norm_eps=("rms_norm_eps", 1e-5),
        ),
        block_type="output_norm",
        qk_norm_axes="all_heads",
        sliding_windows=windows,
        local_rope=_read_rope(config, LAYER_TYPES[1], DEFAULT_THETA),
    )


def _read_rope(config: HFConfig, layer_type: str, theta: Any) -> Rope:
    return read_layer_rope(
        config,
        layer_type,
        layer_types=LAYER_TYPES,
        theta=theta,
        head_dim=olmo2.sizes(config)["head_dim"],
        max_positions=read_size(config, "max_position_embeddings", 2048),
    )


FAMILY = _llama_style.build_family(
    name="olmo3",
    sizes=olmo2.sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.OUTPUT_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.ALL_HEADS_QK_NORMS,
        **_llama_style.gated_mlp(),
    },
    # Levanter stacks layers of one type. The layers of OLMo 3 are of two.
    layouts=lambda parameters: {
        "levanter-unscanned": levanter_layouts(parameters, layers_module="_layers")[
            "levanter-unscanned"
        ]
    },
)
