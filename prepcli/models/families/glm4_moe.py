"""GLM-4.5 and later (`glm4_moe`): partly rotated heads, optional norms of queries and keys, DeepSeek-V3's experts."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _deepseek_style, _grouped_style, _llama_style, _moe_style
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rope_config import read_rope

HAS_BIAS = if_set("attention_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Glm4MoeConfig."""
    # Half of the default width in Glm4MoeConfig, 4096 // 96 = 42, is no whole number of pairs to rotate.
    # The published models have 96 heads of 128 elements.
    head_dim = None if "num_attention_heads" in config else 128
    axis_sizes = _llama_style.sizes(
        config, vocab=151552, mlp=10944, layers=46, heads=96, kv_heads=8, head_dim=head_dim
    )
    expert_width = read_size(config, "moe_intermediate_size", 1408)
    return {
        **axis_sizes,
        **_moe_style.layer_sizes(axis_sizes["layers"], dense_layers(config)),
        "mlp": expert_width,
        "dense_mlp": axis_sizes["mlp"],
        "shared_mlp": expert_width * read_size(config, "n_shared_experts", 1),
        "experts": _deepseek_style.read_experts(config, 128),
        "gate_up": 2,
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    return _deepseek_style.first_dense_layers(config, layers=46, default=1)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    attention_fields = ("attention_bias", "use_qk_norm", "partial_rotary_factor")
    reject_unsupported_fields(config, *ROPE_FIELDS, *_deepseek_style.MOE_FIELDS, *attention_fields)
    axis_sizes = sizes(config)
    max_positions = read_size(config, "max_position_embeddings", 131072)
    rope = read_rope(
        {"partial_rotary_factor": 0.5, **config},
        axis_sizes["head_dim"],
        max_positions=max_positions,
        allow_partial=True,
    )
    experts_per_token = _llama_style.read_experts_per_token(
        config, axis_sizes["experts"], default=8
    )
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=max_positions, rope=rope),
        norm_eps=read_positive(config, "rms_norm_eps", 1e-5),
        experts_per_token=experts_per_token,
        router=_deepseek_style.grouped_router(
            config, axis_sizes["experts"], experts_per_token, groups=(1, 1), scale=1.0
        ),
        dense_layers=dense_layers(config),
    )


FAMILY = _moe_style.build_family(
    name="glm4_moe",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=HAS_BIAS),
        **_grouped_style.under_condition(_llama_style.QK_NORMS, lambda config: bool(config.get("use_qk_norm"))),
    },
    moe=_deepseek_style.CORRECTED_EXPERTS,
    dense_layers=dense_layers,
    default_prediction_layers=1,
)  # fmt: skip
