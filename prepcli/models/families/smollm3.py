"""SmolLM3: LLaMA with layers whose queries and keys do not rotate, by default every fourth one."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_sliding_windows,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of SmolLM3Config."""
    return _llama_style.sizes(config, vocab=128256, embed=2048, layers=36, heads=16, kv_heads=4)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config,
        *ROPE_FIELDS,
        *("attention_bias", "mlp_bias", "layer_types", "sliding_window", "no_rope_layers"),
    )
    axis_sizes = sizes(config)
    layers = axis_sizes["layers"]
    rotates = _llama_style.read_rotating_layers(config, layers)
    window = config.get("sliding_window")
    if config.get("layer_types") is None and not config.get("use_sliding_window"):
        window = None
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=32768, rope_theta=2_000_000.0),
        layers_without_rope=tuple(layer for layer in range(layers) if not rotates[layer]),
        sliding_windows=read_sliding_windows(
            config, layers, window, lambda layer: not rotates[layer]
        ),
    )


FAMILY = _llama_style.build_family(
    name="smollm3",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.gated_mlp(bias=if_set("mlp_bias")),
    },
)
