"""DeepSeek-V3: latent attention, first dense layers, and experts chosen by sigmoid scores in groups."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _deepseek_style, _llama_style, _moe_style
from prepcli.models.parameters import HFConfig, read_size
from prepcli.models.rows import unless_false
from prepcli.models.torchtitan_layouts import torchtitan_deepseek_layout


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of DeepseekV3Config."""
    # The default 128 of `num_key_value_heads` is the one of `num_attention_heads`. A null means as many.
    axis_sizes = _llama_style.sizes(
        config, vocab=129280, embed=7168, mlp=18432, layers=61, heads=128, kv_heads=128
    )
    expert_width = read_size(config, "moe_intermediate_size", 2048)
    return {
        **axis_sizes,
        **_deepseek_style.latent_sizes(config, axis_sizes),
        **_moe_style.layer_sizes(axis_sizes["layers"], dense_layers(config)),
        "mlp": expert_width,
        "dense_mlp": axis_sizes["mlp"],
        "shared_mlp": expert_width * read_size(config, "n_shared_experts", 1),
        "experts": _deepseek_style.read_experts(config, 256),
        "gate_up": 2,
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    return _deepseek_style.first_dense_layers(config, layers=61, default=3)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *ROPE_FIELDS, *_deepseek_style.LATENT_FIELDS, *_deepseek_style.MOE_FIELDS
    )
    axis_sizes = sizes(config)
    experts_per_token = _llama_style.read_experts_per_token(
        config, axis_sizes["experts"], default=8
    )
    return dataclasses.replace(
        _deepseek_style.latent_arch_config(
            config,
            axis_sizes,
            max_positions=4096,
            is_interleaved=bool(config.get("rope_interleave", True)),
        ),
        experts_per_token=experts_per_token,
        router=_deepseek_style.grouped_router(
            config, axis_sizes["experts"], experts_per_token, groups=(8, 4), scale=2.5
        ),
        dense_layers=dense_layers(config),
    )


_FAMILY = _moe_style.build_family(
    name="deepseek_v3",
    sizes=sizes,
    arch_config=arch_config,
    layer={**_llama_style.PRE_NORMS, **_deepseek_style.latent_attention()},
    moe=_deepseek_style.CORRECTED_EXPERTS,
    dense_layers=dense_layers,
    default_prediction_layers=1,
)
FAMILY = dataclasses.replace(
    _FAMILY,
    layouts=torchtitan_deepseek_layout(
        _FAMILY.parameters,
        _FAMILY.layer_numbers,
        has_adjacent_pairs=unless_false("rope_interleave"),
    ),
)
