"""Falcon-H1: attention and Mamba-2 side by side in each layer, with a factor for most projections."""

from __future__ import annotations

import dataclasses
from typing import Any

from prepcli.core.errors import invalid_config_error
from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _grouped_style, _hybrid_style, _llama_style
from prepcli.models.mixer_config import Mixer
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rows import linear, unless_false

MAX_POSITIONS = 8192
# The projections in the order of `ssm_multipliers`. Their values, keys and queries are x, B and C there.
MIXER_PROJECTIONS = ("z", "v", "k", "q", "dt")
FIELDS = (
    *ROPE_FIELDS,
    "attention_bias",
    "mlp_bias",
    "embedding_multiplier",
    "lm_head_multiplier",
)


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of FalconH1Config."""
    axis_sizes = _llama_style.sizes(
        config, vocab=128000, embed=4096, mlp=14336, layers=32, heads=32, kv_heads=8
    )
    expanded = axis_sizes["embed"] * read_size(config, "mamba_expand", 2)
    # A null, unlike an absent field, means the expanded width.
    default = expanded if "mamba_d_ssm" in config else 1024
    return {
        **axis_sizes,
        **_hybrid_style.read_mamba2_sizes(
            config,
            embed=read_size(config, "mamba_d_ssm", default),
            heads=("mamba_n_heads", 128),
            head_dim=("mamba_d_head", None),
            groups=("mamba_n_groups", 1),
            state=("mamba_d_state", 256),
            kernel=("mamba_d_conv", 4),
        ),
    }


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *FIELDS)
    axis_sizes = sizes(config)
    arch = _llama_style.arch_config(
        config, axis_sizes, max_positions=MAX_POSITIONS, norm_eps=("rms_norm_eps", 1e-5)
    )
    gate_scale, mlp_output_scale = _read_factors(config, "mlp_multipliers", count=2)
    return dataclasses.replace(
        arch,
        embed_scale=read_positive(config, "embedding_multiplier", 1.0),
        lm_head_input_scale=read_positive(config, "lm_head_multiplier", 1.0),
        # Scores are linear in the keys.
        attn_scale=arch.attn_scale * read_positive(config, "key_multiplier", 1.0),
        attn_input_scale=read_positive(config, "attention_in_multiplier", 1.0),
        attn_output_scale=read_positive(config, "attention_out_multiplier", 1.0),
        gate_scale=gate_scale,
        mlp_output_scale=mlp_output_scale,
        mixer=_read_mixer(config),
        mixer_layers=tuple(range(axis_sizes["layers"])),
        has_attention_beside_mixer=True,
    )


def _read_mixer(config: HFConfig) -> Mixer:
    """Return Mamba-2 with its factors. Its norm is optional."""
    norm_place = "before_gate" if config.get("mamba_norm_before_gate", True) else "after_gate"
    if not config.get("mamba_rms_norm"):
        norm_place = "none"
    factors = _read_factors(config, "ssm_multipliers", count=len(MIXER_PROJECTIONS))
    return dataclasses.replace(
        _hybrid_style.read_mamba2(config),
        norm_place=norm_place,
        input_scale=read_positive(config, "ssm_in_multiplier", 1.0),
        projection_scales=tuple(zip(MIXER_PROJECTIONS, factors)),
        output_scale=read_positive(config, "ssm_out_multiplier", 1.0),
    )


def _read_factors(config: HFConfig, key: str, *, count: int) -> list[float]:
    """Return the factors in a config field, or ones if it is absent or null.

    Raises:
        PrepError: The value is not a list of `count` numbers above 0.
    """
    listed: Any = config.get(key)
    if listed is None:
        return [1.0] * count
    if not isinstance(listed, list) or len(listed) != count:
        raise invalid_config_error(f"{key} is {listed!r:.60}, it must be {count} numbers")
    return [read_positive({key: factor}, key, 1.0) for factor in listed]


MLP_BIAS = if_set("mlp_bias")

FAMILY = _grouped_style.build_family(
    name="falcon_h1",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.rms_norms(attn_norm="input_layernorm", mlp_norm="pre_ff_layernorm"),
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_hybrid_style.mamba2(
            "mamba",
            bias=if_set("mamba_proj_bias"),
            out_bias=if_set("projectors_bias"),
            conv_bias=unless_false("mamba_conv_bias"),
            norm=if_set("mamba_rms_norm"),
        ),
        **linear("mlp.gate", "mlp embed <- feed_forward.gate_proj.weight: mlp embed", MLP_BIAS),
        **linear("mlp.up", "mlp embed <- feed_forward.up_proj.weight: mlp embed", MLP_BIAS),
        **linear("mlp.down", "embed mlp <- feed_forward.down_proj.weight: embed mlp", MLP_BIAS),
    },
    groups={},
    final_norm=_llama_style.rms_norm("final_norm", "embed <- final_layernorm.weight: embed"),
)
