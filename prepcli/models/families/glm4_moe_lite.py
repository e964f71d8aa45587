"""GLM-4.7-Flash (`glm4_moe_lite`): the layers of DeepSeek-V3 with dense layers by a list."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _deepseek_style, _llama_style, _moe_style
from prepcli.models.parameters import MAX_LAYERS, HFConfig, read_size


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Glm4MoeLiteConfig."""
    axis_sizes = _llama_style.sizes(
        config, vocab=154880, embed=2048, mlp=10240, layers=47, heads=20, kv_heads=20
    )
    expert_width = read_size(config, "moe_intermediate_size", 1536)
    return {
        **axis_sizes,
        **_deepseek_style.latent_sizes(config, axis_sizes, q_rank=768, key_dim=192, value_dim=256),
        **_moe_style.layer_sizes(axis_sizes["layers"], dense_layers(config)),
        "mlp": expert_width,
        "dense_mlp": axis_sizes["mlp"],
        "shared_mlp": expert_width * read_size(config, "n_shared_experts", 1),
        "experts": _deepseek_style.read_experts(config, 64),
        "gate_up": 2,
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    layers = read_size(config, "num_hidden_layers", 47, MAX_LAYERS)
    return _moe_style.read_dense_layers_by_type(config, layers, default=(0,))


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    moe_fields = ("n_routed_experts", "num_local_experts", "n_shared_experts")
    reject_unsupported_fields(
        config,
        *ROPE_FIELDS,
        *_deepseek_style.LATENT_FIELDS,
        *moe_fields,
        *("routed_scaling_factor", "first_k_dense_replace"),
    )
    _moe_style.check_first_dense_layers(config, dense_layers(config))
    axis_sizes = sizes(config)
    experts_per_token = _llama_style.read_experts_per_token(
        config, axis_sizes["experts"], default=4
    )
    return dataclasses.replace(
        _deepseek_style.latent_arch_config(
            config,
            axis_sizes,
            max_positions=202752,
            is_interleaved=bool(config.get("rope_interleave", True)),
        ),
        norm_eps=read_positive(config, "rms_norm_eps", 1e-5),
        experts_per_token=experts_per_token,
        router=_deepseek_style.grouped_router(
            config, axis_sizes["experts"], experts_per_token, groups=(1, 1), scale=1.8
        ),
        dense_layers=dense_layers(config),
    )


FAMILY = _moe_style.build_family(
    name="glm4_moe_lite",
    sizes=sizes,
    arch_config=arch_config,
    layer={**_llama_style.PRE_NORMS, **_deepseek_style.latent_attention()},
    moe=_deepseek_style.CORRECTED_EXPERTS,
    dense_layers=dense_layers,
    default_prediction_layers=1,
)
