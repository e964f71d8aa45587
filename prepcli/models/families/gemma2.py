"""Gemma 2: Gemma 1 with norms before and after each sublayer, softcaps, and a sliding window in every other layer."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    read_sliding_windows,
    read_softcap,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style
from prepcli.models.levanter_layouts import levanter_layouts
from prepcli.models.maxtext_gemma_layouts import maxtext_gemma2_layouts
from prepcli.models.orbax_layouts import tunix_gemma_layout
from prepcli.models.parameters import HFConfig, if_set


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Gemma2Config."""
    axis_sizes = _llama_style.sizes(
        config, vocab=256000, embed=2304, mlp=9216, layers=26, heads=8, kv_heads=4, head_dim=256
    )
    # No axis has this size. MaxText divides the kernel of the queries by its square root. A fraction has no layout.
    scalar = read_positive(config, "query_pre_attn_scalar", 256)
    if scalar == int(scalar):
        axis_sizes["query_pre_attn_scalar"] = int(scalar)
    return axis_sizes


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    softcap_fields = ("attn_logit_softcapping", "final_logit_softcapping")
    reject_unsupported_fields(
        config,
        *ROPE_FIELDS,
        "attention_bias",
        "layer_types",
        "query_pre_attn_scalar",
        "sliding_window",
        *softcap_fields,
    )
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            axis_sizes,
            max_positions=8192,
            activation=("hidden_activation", "gelu_pytorch_tanh"),
        ),
        norm="rms_offset",
        block_type="sandwich",
        embed_scale=axis_sizes["embed"] ** 0.5,
        # The scale is a field of its own. Gemma 2 27B divides by sqrt(144), and its heads have 128
        # elements.
        attn_scale=read_positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        sliding_windows=read_sliding_windows(
            config,
            axis_sizes["layers"],
            config.get("sliding_window", 4096),
            lambda layer: layer % 2 == 0,
        ),
        attn_logit_softcap=read_softcap(config, "attn_logit_softcapping", 50.0),
        final_logit_softcap=read_softcap(config, "final_logit_softcapping", 30.0),
    )


FAMILY = _llama_style.build_family(
    name="gemma2",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **_llama_style.SANDWICH_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.gated_mlp(),
    },
    layouts=lambda parameters: {
        **maxtext_gemma2_layouts(parameters, sizes),
        **tunix_gemma_layout(parameters, sizes, post_attention_norm="post_attn_norm"),
        **levanter_layouts(parameters),
    },
)
