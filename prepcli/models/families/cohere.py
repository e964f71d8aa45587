"""Cohere Command R: attention and MLP of one normalized input, rotated neighbouring elements, scaled logits."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, Parameter, if_set
from prepcli.models.rows import Parameters, rms_norm

# Layer norms without a bias have the rows of RMS norms.
NORM = rms_norm("attn_norm", "embed <- input_layernorm.weight: embed")
# One norm for each head of a layer.
QK_NORMS: Parameters = {
    f"attn.{projection}_norm.scale": Parameter(
        f"{heads} head_dim <- self_attn.{projection}_norm.weight: {heads} head_dim",
        condition=if_set("use_qk_norm"),
    )
    for projection, heads in (("q", "heads"), ("k", "kv_heads"))
}


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of CohereConfig."""
    return _llama_style.sizes(config, vocab=256000, embed=8192, mlp=22528, layers=40, heads=64)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "logit_scale", "use_qk_norm")
    return parallel_arch_config(config, default_theta=500_000.0)


def parallel_arch_config(config: HFConfig, default_theta: float) -> ArchConfig:
    """Return the architecture that Cohere 1 and 2 share. Raise PrepError if the config is invalid.

    Args:
        config: Content of a config.json.
        default_theta: Default of the rotary base.
    """
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            sizes(config),
            max_positions=8192,
            rope_theta=default_theta,
            norm_eps=("layer_norm_eps", 1e-5),
        ),
        norm="layer",
        block_type="parallel_one_norm",
        rotary_pairs="interleaved",
        lm_head_input_scale=read_positive(config, "logit_scale", 0.0625),
    )


FAMILY = _llama_style.build_family(
    name="cohere",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **NORM,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **QK_NORMS,
        **_llama_style.gated_mlp(),
    },
)
