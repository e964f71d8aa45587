"""Helium: LLaMA that rotates neighbouring elements."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import unsupported_config_error
from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of HeliumConfig."""
    axis_sizes = _llama_style.sizes(
        config, vocab=48000, embed=2560, mlp=7040, layers=24, heads=20, kv_heads=20, head_dim=128
    )
    if axis_sizes["heads"] * axis_sizes["head_dim"] != axis_sizes["embed"]:
        why = f"{axis_sizes['heads']} heads of {axis_sizes['head_dim']} elements, width {axis_sizes['embed']}"
        raise unsupported_config_error(
            "num_attention_heads * head_dim != hidden_size is not supported", why
        )
    return axis_sizes


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "mlp_bias")
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            sizes(config),
            max_positions=4096,
            rope_theta=100_000.0,
            norm_eps=("rms_norm_eps", 1e-8),
        ),
        rotary_pairs="interleaved",
    )


FAMILY = _llama_style.build_family(
    name="helium",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias")),
        **_llama_style.gated_mlp(bias=if_set("mlp_bias")),
    },
)
