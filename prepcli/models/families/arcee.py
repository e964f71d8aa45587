"""Arcee AFM: LLaMA with an MLP of two matrices and squared ReLU."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of ArceeConfig."""
    return _llama_style.sizes(config, embed=2560, mlp=18432)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "mlp_bias")
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            sizes(config),
            max_positions=4096,
            activation=("hidden_act", "relu2"),
            norm_eps=("rms_norm_eps", 1e-5),
        ),
        has_gated_mlp=False,
    )


FAMILY = _llama_style.build_family(
    name="arcee",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.plain_mlp(bias=if_set("mlp_bias")),
    },
)
