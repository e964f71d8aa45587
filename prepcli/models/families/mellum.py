"""Mellum 2: Qwen3-MoE with sliding windows in listed layers, and a rotary embedding per layer type."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    LAYER_TYPES,
    ArchConfig,
    read_sliding_windows,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style, _moe_style
from prepcli.models.moe_config import Router
from prepcli.models.parameters import MAX_LAYERS, HFConfig, if_set, read_size
from prepcli.models.rope_config import Rope, read_layer_rope

HAS_BIAS = if_set("attention_bias")
# Base of frequencies of each layer type in MellumConfig if the config has no `rope_parameters`.
DEFAULT_THETAS = {"full_attention": 500_000.0, "sliding_attention": 10_000.0}


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of MellumConfig."""
    axis_sizes = _llama_style.sizes(
        config, vocab=98304, embed=2304, mlp=7168, layers=28, kv_heads=4, head_dim=128
    )
    # transformers uses `num_local_experts` if a config has both names.
    experts = read_size(config, "num_local_experts", read_size(config, "num_experts", 64))
    return {
        **axis_sizes,
        **_moe_style.layer_sizes(axis_sizes["layers"], dense_layers(config)),
        "mlp": read_size(config, "moe_intermediate_size", 896),
        "dense_mlp": axis_sizes["mlp"],
        "experts": experts,
        "gate_up": 2,
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    layers = read_size(config, "num_hidden_layers", 28, MAX_LAYERS)
    return _moe_style.read_dense_layers_by_type(config, layers, default=())


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    # transformers does not read `rope_scaling` and `rope_theta`, the fields of version 4.
    reject_unsupported_fields(
        config,
        *("rope_parameters", "attention_bias", "sliding_window", "layer_types"),
        *("num_experts", "num_local_experts"),
    )
    axis_sizes = sizes(config)
    windows = read_sliding_windows(
        config, axis_sizes["layers"], config.get("sliding_window", 1024), lambda layer: False
    )
    return dataclasses.replace(
        _llama_style.arch_config(
            config, axis_sizes, max_positions=131072, rope=_read_rope(config, LAYER_TYPES[0])
        ),
        sliding_windows=windows,
        local_rope=_read_rope(config, LAYER_TYPES[1]),
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=8
        ),
        router=Router(is_normalized=bool(config.get("norm_topk_prob", True))),
        dense_layers=dense_layers(config),
    )


def _read_rope(config: HFConfig, layer_type: str) -> Rope:
    return read_layer_rope(
        config,
        layer_type,
        layer_types=LAYER_TYPES,
        theta=DEFAULT_THETAS[layer_type],
        head_dim=sizes(config)["head_dim"],
        max_positions=read_size(config, "max_position_embeddings", 131072),
    )


FAMILY = _moe_style.build_family(
    name="mellum",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
        **_llama_style.QK_NORMS,
    },
    moe=_moe_style.EXPERTS,
    dense_layers=dense_layers,
)
