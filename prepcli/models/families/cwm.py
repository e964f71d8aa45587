"""CWM: Llama 3 with a sliding window in three of four layers."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_sliding_windows,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rope_config import read_rope

MAX_POSITIONS = 131_072
# `rope_parameters` of CwmConfig.
DEFAULT_ROPE = {
    "rope_theta": 1_000_000.0,
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of CwmConfig."""
    return _llama_style.sizes(
        config, vocab=128256, embed=6144, mlp=21504, layers=64, heads=48, kv_heads=8, head_dim=128
    )


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "layer_types", "sliding_window", "mlp_bias")
    axis_sizes = sizes(config)
    rope_parameters = config.get("rope_parameters")
    if rope_parameters is None:
        rope_parameters = DEFAULT_ROPE
    rope = read_rope(
        {**config, "rope_parameters": rope_parameters},
        axis_sizes["head_dim"],
        max_positions=read_size(config, "max_position_embeddings", MAX_POSITIONS),
        default_theta=1_000_000.0,
    )
    windows = read_sliding_windows(
        config,
        axis_sizes["layers"],
        config.get("sliding_window", 8192),
        lambda layer: layer % 4 != 0,
    )
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            axis_sizes,
            max_positions=MAX_POSITIONS,
            rope=rope,
            norm_eps=("rms_norm_eps", 1e-5),
        ),
        sliding_windows=windows,
    )


FAMILY = _llama_style.build_family(
    name="cwm",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(),
        **_llama_style.gated_mlp(bias=if_set("mlp_bias")),
    },
)
