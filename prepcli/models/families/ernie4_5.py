"""ERNIE 4.5 (dense): LLaMA that rotates neighbouring elements, with a tied head."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Ernie4_5Config."""
    return _llama_style.sizes(
        config, vocab=103424, embed=1024, mlp=3072, layers=18, heads=16, kv_heads=2, head_dim=128
    )


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS)
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            sizes(config),
            max_positions=131072,
            rope_theta=500_000.0,
            norm_eps=("rms_norm_eps", 1e-5),
        ),
        rotary_pairs="interleaved",
    )


FAMILY = _llama_style.build_family(
    name="ernie4_5",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=if_set("use_bias"), out_bias=if_set("use_bias")),
        **_llama_style.gated_mlp(bias=if_set("use_bias")),
    },
)
