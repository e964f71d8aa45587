"""Hunyuan V1 (dense): LLaMA with norms of queries and keys after their rotation."""

from __future__ import annotations

import dataclasses
from typing import Any

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set
from prepcli.models.rows import rms_norm


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of HunYuanDenseV1Config."""
    return _llama_style.sizes(config, vocab=290943)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    # Published files have `use_qk_norm`. The class always has the norms.
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "use_qk_norm")
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _llama_style.arch_config(
            with_static_rope(config, axis_sizes["head_dim"]),
            axis_sizes,
            max_positions=2048,
            norm_eps=("rms_norm_eps", 1e-5),
        ),
        rotates_before_qk_norm=True,
    )


def with_static_rope(config: HFConfig, head_dim: int) -> HFConfig:
    """Return the config with a base of frequencies in place of `alpha`.

    Files call this scaling dynamic, but its base does not depend on the length:
    theta * alpha^(head_dim / (head_dim - 2)).
    """
    scaling: Any = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict) or not scaling.get("alpha") or head_dim <= 2:
        return config
    if scaling.get("rope_type", scaling.get("type")) != "dynamic":
        return config
    theta = read_positive({"rope_theta": 10_000.0, **config, **scaling}, "rope_theta", 10_000.0)
    alpha = read_positive(scaling, "alpha", 1.0)
    static = {"rope_type": "default", "rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}
    return {**config, "rope_scaling": None, "rope_parameters": static}


FAMILY = _llama_style.build_family(
    name="hunyuan_v1_dense",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **rms_norm("attn.q_norm", "head_dim <- self_attn.query_layernorm.weight: head_dim"),
        **rms_norm("attn.k_norm", "head_dim <- self_attn.key_layernorm.weight: head_dim"),
        **_llama_style.gated_mlp(),
    },
)
