"""OLMo 2: LLaMA with norms after attention and MLP, and norms over the queries and keys of all heads."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.levanter_layouts import levanter_layouts
from prepcli.models.parameters import HFConfig, if_set


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Olmo2Config."""
    return _llama_style.sizes(config, vocab=50304)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias")
    return dataclasses.replace(
        _llama_style.arch_config(
            config, sizes(config), max_positions=2048, norm_eps=("rms_norm_eps", 1e-5)
        ),
        block_type="output_norm",
        qk_norm_axes="all_heads",
    )


FAMILY = _llama_style.build_family(
    name="olmo2",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.OUTPUT_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.ALL_HEADS_QK_NORMS,
        **_llama_style.gated_mlp(),
    },
    layouts=lambda parameters: levanter_layouts(parameters),
)
