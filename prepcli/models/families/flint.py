"""Flint: attention with sinks that rotates in sliding layers only, and experts chosen by sigmoid scores."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    FULL_ATTENTION,
    ROPE_FIELDS,
    ArchConfig,
    read_sliding_windows,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style, _moe_style
from prepcli.models.moe_config import Router
from prepcli.models.parameters import MAX_LAYERS, HFConfig, Parameter, if_set, read_size

HAS_BIAS = if_set("attention_bias")
NUM_LAYERS = 49


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of FlintConfig."""
    axis_sizes = _llama_style.sizes(
        config,
        vocab=150144,
        embed=2048,
        mlp=6144,
        layers=NUM_LAYERS,
        heads=32,
        kv_heads=4,
        head_dim=128,
    )
    return {
        **axis_sizes,
        **_moe_style.layer_sizes(axis_sizes["layers"], dense_layers(config)),
        "mlp": read_size(config, "moe_intermediate_size", 512),
        "dense_mlp": axis_sizes["mlp"],
        "shared_mlp": read_size(config, "shared_expert_intermediate_size", 1024),
        "experts": read_size(config, "num_experts", 256),
        "gate_up": 2,
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP, by default the first two."""
    listed = config.get("mlp_only_layers")
    fields = {
        "mlp_only_layers": [0, 1] if listed is None else listed,
        "decoder_sparse_step": config.get("decoder_sparse_step"),
    }
    layers = read_size(config, "num_hidden_layers", NUM_LAYERS, MAX_LAYERS)
    return _moe_style.read_dense_layers_by_step(fields, layers)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config,
        *ROPE_FIELDS,
        *("attention_bias", "sliding_window", "layer_types", "num_experts", "mlp_only_layers"),
    )
    axis_sizes = sizes(config)
    last = axis_sizes["layers"] - 1
    windows = read_sliding_windows(
        config,
        axis_sizes["layers"],
        config.get("sliding_window", 513),
        # The first two layers, every fourth one and the last one have full attention.
        lambda layer: layer >= 2 and layer % 4 != 1 and layer != last,
    )
    full_layers = [layer for layer, window in enumerate(windows) if window == FULL_ATTENTION]
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=262144),
        sliding_windows=windows,
        layers_without_rope=tuple(full_layers),
        has_attention_sinks=True,
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=6
        ),
        router=Router("sigmoid", is_normalized=bool(config.get("norm_topk_prob", True))),
        dense_layers=dense_layers(config),
    )


FAMILY = _moe_style.build_family(
    name="flint",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
        **_llama_style.QK_NORMS,
        "attn.sinks.bias": Parameter(
            "heads <- self_attn.softmax_offset: heads", alternate="heads <- self_attn.sinks: heads"
        ),
    },
    moe={**_moe_style.EXPERTS, **_moe_style.shared_experts("mlp.shared_expert")},
    dense_layers=dense_layers,
)
