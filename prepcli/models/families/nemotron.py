"""Nemotron: rotation of half of each head, layer norms that scale by 1 + weight, squared ReLU."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set

MAX_POSITIONS = 4096


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of NemotronConfig."""
    return _llama_style.sizes(config, vocab=256000, embed=6144, mlp=24576, heads=48)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *ROPE_FIELDS, "attention_bias", "mlp_bias", "partial_rotary_factor"
    )
    axis_sizes = sizes(config)
    rope = _llama_style.read_partial_rope(
        config, axis_sizes["head_dim"], default_share=0.5, max_positions=MAX_POSITIONS
    )
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            axis_sizes,
            MAX_POSITIONS,
            rope=rope,
            activation=("hidden_act", "relu2"),
            norm_eps=("norm_eps", 1e-5),
        ),
        norm="layer_offset",
        has_gated_mlp=False,
        init_std=read_positive(config, "initializer_range", 0.0134),
    )


FAMILY = _llama_style.build_family(
    name="nemotron",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_LAYER_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.plain_mlp(bias=if_set("mlp_bias")),
    },
    final_norm=_llama_style.FINAL_LAYER_NORM,
)
