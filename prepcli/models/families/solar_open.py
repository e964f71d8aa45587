"""Solar Open: LLaMA with the experts of DeepSeek-V3 in all layers."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _deepseek_style, _llama_style, _moe_style
from prepcli.models.parameters import HFConfig, if_set, read_size


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of SolarOpenConfig."""
    axis_sizes = _llama_style.sizes(
        config, vocab=196608, layers=48, heads=64, kv_heads=8, head_dim=128
    )
    return {
        **axis_sizes,
        **_deepseek_style.expert_sizes(
            config,
            axis_sizes,
            dense=(),
            width=1280,
            experts=_deepseek_style.read_experts(config, 128),
            shared=read_size(config, "n_shared_experts", 1),
        ),
    }


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    moe_fields = ("n_routed_experts", "num_local_experts", "n_shared_experts")
    reject_unsupported_fields(
        config,
        *ROPE_FIELDS,
        *moe_fields,
        *("routed_scaling_factor", "attention_bias"),
    )
    axis_sizes = sizes(config)
    experts_per_token = _llama_style.read_experts_per_token(
        config, axis_sizes["experts"], default=8
    )
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=131072, rope_theta=1e6),
        norm_eps=read_positive(config, "rms_norm_eps", 1e-5),
        experts_per_token=experts_per_token,
        router=_deepseek_style.grouped_router(
            config, axis_sizes["experts"], experts_per_token, groups=(1, 1), scale=1.0
        ),
    )


FAMILY = _moe_style.build_family(
    name="solar_open",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias")),
    },
    moe=_deepseek_style.CORRECTED_EXPERTS,
)
