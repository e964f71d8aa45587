"""Jais 2: LLaMA's attention with layer norms, squared ReLU, and biases on all matrices."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig
from prepcli.models.rows import unless_false

HAS_ATTENTION_BIAS = unless_false("attention_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Jais2Config."""
    return _llama_style.sizes(config, vocab=150272, embed=3328, mlp=26624, heads=26)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "mlp_bias")
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            sizes(config),
            max_positions=8192,
            activation=("hidden_act", "relu2"),
            norm_eps=("layer_norm_eps", 1e-5),
        ),
        norm="layer",
        has_gated_mlp=False,
    )


FAMILY = _llama_style.build_family(
    name="jais2",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_LAYER_NORMS,
        **_llama_style.attention(bias=HAS_ATTENTION_BIAS, out_bias=HAS_ATTENTION_BIAS),
        **_llama_style.plain_mlp(bias=unless_false("mlp_bias")),
    },
    final_norm=_llama_style.FINAL_LAYER_NORM,
)
