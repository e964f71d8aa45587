"""Gemma 1: LLaMA with scaled embeddings, norms that scale by 1 + weight, tanh GELU, and a tied head."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.layouts import hf_flax_layout
from prepcli.models.levanter_layouts import levanter_layouts
from prepcli.models.orbax_layouts import tunix_gemma_layout
from prepcli.models.parameters import HFConfig, if_set

TANH_GELU = "gelu_pytorch_tanh"


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GemmaConfig."""
    # 16 heads of 256 elements are 4096, more than the width 3072. `embed // heads` is therefore no
    # default for the width of a head.
    return _llama_style.sizes(
        config, vocab=256000, embed=3072, mlp=24576, layers=28, heads=16, kv_heads=16, head_dim=256
    )


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias")
    axis_sizes = sizes(config)
    if config.get("hidden_act") == "gelu":
        # The first configs of Gemma say "gelu" for the tanh form of GELU.
        config = {
            **config,
            "hidden_act": TANH_GELU,
        }
    return dataclasses.replace(
        _llama_style.arch_config(
            config, axis_sizes, max_positions=8192, activation=("hidden_act", TANH_GELU)
        ),
        norm="rms_offset",
        # The embedding is also the head, and is scaled as an input (arXiv:1706.03762, section 3.4).
        embed_scale=axis_sizes["embed"] ** 0.5,
    )


FAMILY = _llama_style.build_family(
    name="gemma",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.gated_mlp(),
    },
    layouts=lambda parameters: {
        **hf_flax_layout(
            parameters, prefix=_llama_style.TENSOR_PREFIX, norm_name="weight", allows_tied_head=True
        ),
        **tunix_gemma_layout(parameters, sizes),
        **levanter_layouts(parameters),
    },
)
