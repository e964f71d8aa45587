"""Ministral 3: Mistral with YaRN and a factor of queries that grows with the position."""

from __future__ import annotations

import dataclasses
from typing import Any

from prepcli.core.errors import invalid_config_error
from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
    uniform_windows,
)
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, read_size
from prepcli.models.rope_config import QueryScale, Rope, read_rope

MAX_POSITIONS = 262144
# `rope_parameters` of Ministral3Config.
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Ministral3Config."""
    return _llama_style.sizes(config, vocab=131072, mlp=14336, layers=34, kv_heads=8, head_dim=128)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "sliding_window", "layer_types")
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            axis_sizes,
            MAX_POSITIONS,
            rope=_read_scaled_rope(config, axis_sizes["head_dim"]),
            norm_eps=("rms_norm_eps", 1e-5),
        ),
        sliding_windows=uniform_windows(axis_sizes["layers"], config.get("sliding_window")),
    )


def _read_scaled_rope(config: HFConfig, head_dim: int) -> Rope:
    """Read the rotary embedding with the factor of queries."""
    scaling: Any = config.get("rope_scaling") or config.get("rope_parameters")
    if scaling is None:
        scaling = DEFAULT_ROPE
    if not isinstance(scaling, dict):
        raise invalid_config_error(f"its rope scaling is {scaling!r:.60}, it must be an object")
    for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        if scaling.get(key) is None:
            raise invalid_config_error(
                f"its rope scaling has no {key}, which the factor of queries needs"
            )
    positions = read_size(config, "max_position_embeddings", MAX_POSITIONS)
    rope = read_rope(
        {**config, "rope_scaling": None, "rope_parameters": scaling},
        head_dim,
        max_positions=positions,
    )
    query_scale = QueryScale(
        beta=read_positive(scaling, "llama_4_scaling_beta", 0.1),
        step_length=read_size(scaling, "original_max_position_embeddings", 16384),
    )
    return dataclasses.replace(rope, query_scale=query_scale)


FAMILY = _llama_style.build_family(
    name="ministral3",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={**_llama_style.PRE_NORMS, **_llama_style.attention(), **_llama_style.gated_mlp()},
)
