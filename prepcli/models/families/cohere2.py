"""Cohere Command R7B and A: Cohere 1 with sliding windows in three of four layers, and no rotation in the others."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    FULL_ATTENTION,
    ROPE_FIELDS,
    ArchConfig,
    is_in_window_pattern,
    read_sliding_windows,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style, cohere
from prepcli.models.parameters import HFConfig, if_set


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config,
        *ROPE_FIELDS,
        *("attention_bias", "layer_types", "logit_scale", "sliding_window"),
        "sliding_window_pattern",
    )
    windows = read_sliding_windows(
        config,
        cohere.sizes(config)["layers"],
        config.get("sliding_window", 4096),
        lambda layer: is_in_window_pattern(config, layer, default=4),
    )
    full_layers = [layer for layer, width in enumerate(windows) if width == FULL_ATTENTION]
    return dataclasses.replace(
        cohere.parallel_arch_config(config, default_theta=10_000.0),
        sliding_windows=windows,
        layers_without_rope=tuple(full_layers),
    )


FAMILY = _llama_style.build_family(
    name="cohere2",
    sizes=cohere.sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **cohere.NORM,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.gated_mlp(),
    },
)
