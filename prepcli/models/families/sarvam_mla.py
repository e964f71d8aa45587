"""Sarvam MLA: the layers of DeepSeek-V3 with a router over all experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _deepseek_style, _llama_style, _moe_style
from prepcli.models.field_aliases import AliasedConfig
from prepcli.models.parameters import HFConfig, read_size

# Name in published files, which overrides -> name in SarvamMLAConfig.
ALIASES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


def _with_standard_rope(config: HFConfig) -> HFConfig:
    """Return the config with `yarn` in place of `deepseek_yarn`, another name of the same scaling."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return config
    if "deepseek_yarn" not in (scaling.get("type"), scaling.get("rope_type")):
        return config
    yarn = {**scaling, "rope_type": "yarn", "type": "yarn"}
    return {**config, "rope_scaling": yarn}


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of SarvamMLAConfig."""
    config = AliasedConfig(config, ALIASES)
    axis_sizes = _llama_style.sizes(config, vocab=262144, mlp=16384, heads=64)
    return {
        **axis_sizes,
        # Published files have the width of the latent with the rotated elements as `head_dim`.
        **_deepseek_style.latent_sizes(config, axis_sizes, has_head_dim=False),
        **_deepseek_style.expert_sizes(
            config,
            axis_sizes,
            dense_layers(config),
            width=2048,
            experts=_deepseek_style.read_experts(config, 128),
            shared=read_size(config, "n_shared_experts", 1),
        ),
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    return _deepseek_style.first_dense_layers(config, layers=32, default=1)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *ROPE_FIELDS, *_deepseek_style.LATENT_FIELDS, *_deepseek_style.MOE_FIELDS, *ALIASES
    )
    axis_sizes = sizes(config)
    experts_per_token = _llama_style.read_experts_per_token(
        config, axis_sizes["experts"], default=8
    )
    return dataclasses.replace(
        _deepseek_style.latent_arch_config(
            _with_standard_rope(config),
            axis_sizes,
            max_positions=4096,
            is_interleaved=bool(config.get("rope_interleave", True)),
        ),
        init_std=read_positive(config, "initializer_range", 0.006),
        experts_per_token=experts_per_token,
        router=_deepseek_style.grouped_router(
            config, axis_sizes["experts"], experts_per_token, groups=(1, 1), scale=2.5
        ),
        dense_layers=dense_layers(config),
    )


def _has_query_latent(config: HFConfig) -> bool:
    # Without the field there is no latent of queries. DeepSeek-V3 has a default instead.
    return config.get("q_lora_rank") is not None


FAMILY = _moe_style.build_family(
    name="sarvam_mla",
    sizes=sizes,
    arch_config=arch_config,
    layer={**_llama_style.PRE_NORMS, **_deepseek_style.latent_attention(_has_query_latent)},
    moe=_deepseek_style.CORRECTED_EXPERTS,
    dense_layers=dense_layers,
)
