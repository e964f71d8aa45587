"""Qwen2-MoE: Qwen2 with a sparse MoE, and shared experts with a gate."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_sliding_windows,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style, _moe_style
from prepcli.models.moe_config import Router
from prepcli.models.parameters import HFConfig, read_size
from prepcli.models.rows import unless_false


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Qwen2MoeConfig."""
    axis_sizes = _llama_style.sizes(
        config, vocab=151936, embed=2048, layers=24, heads=16, kv_heads=16
    )
    return {
        **axis_sizes,
        **_moe_style.layer_sizes(axis_sizes["layers"], dense_layers(config)),
        "mlp": read_size(config, "moe_intermediate_size", 1408),
        "dense_mlp": read_size(config, "intermediate_size", 5632),
        "shared_mlp": read_size(config, "shared_expert_intermediate_size", 5632),
        "experts": read_size(config, "num_experts", 60),
        "gate_up": 2,
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    return _moe_style.read_dense_layers_by_step(config, read_size(config, "num_hidden_layers", 24))


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    windows = ("sliding_window", "layer_types")
    moe_fields = ("num_experts", "mlp_only_layers")
    reject_unsupported_fields(config, *ROPE_FIELDS, *windows, *moe_fields, "qkv_bias")
    axis_sizes = sizes(config)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    last = _llama_style.read_max_window_layers(config)
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=32768),
        sliding_windows=read_sliding_windows(
            # Qwen2MoeConfig gives a window to layers 0, 2, 4 and so on, below `max_window_layers`.
            config, axis_sizes["layers"], window, lambda layer: layer % 2 == 0 and layer < last
        ),
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=4
        ),
        router=Router(is_normalized=bool(config.get("norm_topk_prob", False))),
        dense_layers=dense_layers(config),
    )  # fmt: skip


FAMILY = _moe_style.build_family(
    name="qwen2_moe",
    sizes=sizes,
    arch_config=arch_config,
    layer={**_llama_style.PRE_NORMS, **_llama_style.attention(bias=unless_false("qkv_bias"))},
    moe=_moe_style.GATED_SHARED_EXPERTS,
    dense_layers=dense_layers,
)
