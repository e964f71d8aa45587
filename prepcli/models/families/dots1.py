"""dots.llm1: Qwen3's attention with the experts of DeepSeek-V3."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_sliding_windows,
    reject_unsupported_fields,
)
from prepcli.models.families import _deepseek_style, _llama_style, _moe_style
from prepcli.models.parameters import HFConfig, if_set, read_size

HAS_BIAS = if_set("attention_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Dots1Config."""
    axis_sizes = _llama_style.sizes(
        config, vocab=152064, embed=4608, mlp=10944, layers=62, kv_heads=32
    )
    expert_width = read_size(config, "moe_intermediate_size", 1408)
    # Dots1Config has no default for the numbers of experts. dots.llm1 has 128 and 2.
    return {
        **axis_sizes,
        **_moe_style.layer_sizes(axis_sizes["layers"], dense_layers(config)),
        "mlp": expert_width,
        "dense_mlp": axis_sizes["mlp"],
        "shared_mlp": expert_width * read_size(config, "n_shared_experts", 2),
        "experts": _deepseek_style.read_experts(config, 128),
        "gate_up": 2,
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    return _deepseek_style.first_dense_layers(config, layers=62, default=0)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    windows = ("sliding_window", "layer_types")
    # The class always has norms of queries and keys.
    others = ("attention_bias", "use_qk_norm")
    reject_unsupported_fields(config, *ROPE_FIELDS, *windows, *_deepseek_style.MOE_FIELDS, *others)
    axis_sizes = sizes(config)
    first = _llama_style.read_max_window_layers(config, default=62)
    experts_per_token = _llama_style.read_experts_per_token(
        config, axis_sizes["experts"], default=6
    )
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=2048),
        sliding_windows=read_sliding_windows(
            config,
            axis_sizes["layers"],
            config.get("sliding_window", 4096),
            lambda layer: layer >= first,
        ),
        experts_per_token=experts_per_token,
        router=_deepseek_style.grouped_router(
            config,
            axis_sizes["experts"],
            experts_per_token,
            groups=(1, 1),
            scale=1.0,
            is_normalized=False,
        ),
        dense_layers=dense_layers(config),
    )


FAMILY = _moe_style.build_family(
    name="dots1",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
        **_llama_style.QK_NORMS,
    },
    moe=_deepseek_style.CORRECTED_EXPERTS,
    dense_layers=dense_layers,
)
