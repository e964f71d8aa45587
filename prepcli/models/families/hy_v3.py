"""Hunyuan 3: Qwen3's attention with the experts of DeepSeek-V3 under other names."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _deepseek_style, _llama_style, _moe_style
from prepcli.models.moe_config import Router
from prepcli.models.parameters import MAX_LAYERS, HFConfig, Parameter, if_set, read_size
from prepcli.models.rows import Parameters

HAS_BIAS = if_set("attention_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of HYV3Config."""
    axis_sizes = _llama_style.sizes(
        config, vocab=120832, mlp=13312, layers=80, heads=64, kv_heads=8, head_dim=128
    )
    # transformers uses `num_local_experts` if a config has both names.
    experts = read_size(config, "num_local_experts", read_size(config, "num_experts", 192))
    return {
        **axis_sizes,
        **_deepseek_style.expert_sizes(
            config,
            axis_sizes,
            dense_layers(config),
            width=1536,
            experts=experts,
            shared=read_size(config, "num_shared_experts", 1),
        ),
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    layers = read_size(config, "num_hidden_layers", 80, MAX_LAYERS)
    return _moe_style.read_dense_layers_by_type(config, layers, default=(0,))


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    # Published files have `qk_norm` and `route_norm`. The class always has both.
    reject_unsupported_fields(
        config,
        *ROPE_FIELDS,
        *("attention_bias", "num_experts", "num_local_experts", "num_shared_experts"),
        *("first_k_dense_replace", "use_qk_norm"),
    )
    _moe_style.check_first_dense_layers(config, dense_layers(config))
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            axis_sizes,
            max_positions=131072,
            norm_eps=("rms_norm_eps", 1e-5),
            rope_theta=11_158_840.0,
        ),
        init_std=read_positive(config, "initializer_range", 0.006),
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=8
        ),
        router=Router(
            "sigmoid",
            scale=read_positive(config, "router_scaling_factor", 2.826),
            weight_sum_offset=1e-20,
        ),
        dense_layers=dense_layers(config),
    )


CORRECTION: Parameters = {
    "mlp.router.correction.bias": Parameter(
        "experts <- mlp.expert_bias: experts",
        alternate="experts <- mlp.e_score_correction_bias: experts",
    )
}
FAMILY = _moe_style.build_family(
    name="hy_v3",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
        **_llama_style.QK_NORMS,
    },
    moe={
        **_llama_style.experts(
            gate="mlp.experts.{experts}.gate_proj.weight",
            up="mlp.experts.{experts}.up_proj.weight",
            down="mlp.experts.{experts}.down_proj.weight",
            router="mlp.router.gate.weight",
        ),
        **CORRECTION,
        **_moe_style.shared_experts("mlp.shared_mlp"),
    },
    dense_layers=dense_layers,
    default_prediction_layers=1,
)
