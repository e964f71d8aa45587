"""FlexOlmo: the layers of OLMo 2 with a sparse MoE of experts that were trained apart."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style, _moe_style
from prepcli.models.moe_config import Router
from prepcli.models.parameters import HFConfig, if_set, read_size

HAS_BIAS = if_set("attention_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of FlexOlmoConfig."""
    # transformers uses `num_local_experts` if a config has both names.
    experts = read_size(config, "num_local_experts", read_size(config, "num_experts", 7))
    return {**_llama_style.sizes(config, vocab=100352), "experts": experts, "gate_up": 2}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    moe_fields = ("num_experts", "num_local_experts")
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", *moe_fields)
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=4096, rope_theta=500_000.0),
        block_type="output_norm",
        qk_norm_axes="all_heads",
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=5
        ),
        router=Router(is_normalized=bool(config.get("norm_topk_prob", False))),
    )


FAMILY = _moe_style.build_family(
    name="flex_olmo",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.OUTPUT_NORMS,
        **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
        **_llama_style.ALL_HEADS_QK_NORMS,
    },
    moe=_moe_style.EXPERTS,
)
