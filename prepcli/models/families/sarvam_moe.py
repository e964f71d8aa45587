"""Sarvam MoE: fused queries, keys and values with norms, first dense layers, and DeepSeek-V3's experts."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _deepseek_style, _grouped_style, _llama_style, _moe_style
from prepcli.models.field_aliases import AliasedConfig
from prepcli.models.parameters import HFConfig, Parameter, read_size
from prepcli.models.rows import Parameters, linear, matrix, rms_norm, unless_false

QKV = "head_dim embed <- attention.query_key_value.weight"
# Name in published files, which overrides -> name in SarvamMoEConfig.
ALIASES = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "use_qkv_bias": "attention_bias",
}
HAS_QK_NORMS = unless_false("use_qk_norm")


def _has_bias(config: HFConfig) -> bool:
    return bool(AliasedConfig(config, ALIASES).get("attention_bias"))


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of SarvamMoEConfig."""
    config = AliasedConfig(config, ALIASES)
    axis_sizes = _llama_style.sizes(
        config,
        vocab=262144,
        mlp=8192,
        layers=19,
        heads=64,
        kv_heads=4,
        head_dim=64,
    )
    return {
        **axis_sizes,
        **_deepseek_style.expert_sizes(
            config,
            axis_sizes,
            dense_layers(config),
            width=1024,
            experts=_deepseek_style.read_experts(config, 128),
            shared=read_size(config, "n_shared_experts", 1),
        ),
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    return _deepseek_style.first_dense_layers(config, layers=19, default=1)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    fields = ("attention_bias", "use_qk_norm", "partial_rotary_factor")
    reject_unsupported_fields(config, *ROPE_FIELDS, *_deepseek_style.MOE_FIELDS, *ALIASES, *fields)
    axis_sizes = sizes(config)
    rope = _llama_style.read_partial_rope(
        config,
        axis_sizes["head_dim"],
        default_share=1.0,
        max_positions=131072,
        default_theta=8e6,
    )
    max_positions = read_size(config, "max_position_embeddings", 131072)
    experts_per_token = _llama_style.read_experts_per_token(
        config, axis_sizes["experts"], default=6
    )
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=max_positions, rope=rope),
        init_std=read_positive(config, "initializer_range", 0.006),
        experts_per_token=experts_per_token,
        router=_deepseek_style.grouped_router(
            config, axis_sizes["experts"], experts_per_token, groups=(1, 1), scale=2.5
        ),
        dense_layers=dense_layers(config),
    )


def _attention() -> Parameters:
    """Return the parameters of attention. One tensor has all queries, then all keys, then all values."""
    # With 4 heads and 2 kv_heads of 8 elements, rows 0 to 31 are queries, 32 to 47 keys, and 48 to 63 values.
    q = "(>heads head_dim | kv_heads head_dim | kv_heads head_dim)"
    k = "(heads head_dim | >kv_heads head_dim | kv_heads head_dim)"
    v = "(heads head_dim | kv_heads head_dim | >kv_heads head_dim)"
    norms = {
        **rms_norm("attn.q_norm", "head_dim <- attention.query_layernorm.weight: head_dim"),
        **rms_norm("attn.k_norm", "head_dim <- attention.key_layernorm.weight: head_dim"),
    }
    return {
        **linear("attn.q", f"heads {QKV}: {q} embed", _has_bias),
        **linear("attn.k", f"kv_heads {QKV}: {k} embed", _has_bias),
        **linear("attn.v", f"kv_heads {QKV}: {v} embed", _has_bias),
        **matrix("attn.o", "embed heads head_dim <- attention.dense.weight: embed (heads head_dim)"),
        **_grouped_style.under_condition(norms, HAS_QK_NORMS),
    }  # fmt: skip


def _experts() -> Parameters:
    """Return the parameters of DeepSeek-V3's experts, with another name of the correction."""
    correction: Parameters = {
        "mlp.router.correction.bias": Parameter("experts <- mlp.gate.expert_bias: experts")
    }
    return {**_deepseek_style.CORRECTED_EXPERTS, **correction}


FAMILY = _moe_style.build_family(
    name="sarvam_moe",
    sizes=sizes,
    arch_config=arch_config,
    layer={**_llama_style.PRE_NORMS, **_attention()},
    moe=_experts(),
    dense_layers=dense_layers,
    tokens="word_embeddings.weight",
)
