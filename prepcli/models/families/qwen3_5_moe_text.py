"""Qwen3.5-MoE (the language model): the layers of Qwen3.5, with experts in place of the MLP."""

from __future__ import annotations

import dataclasses

from prepcli.algebra.axis_map import ATTENTION_LAYERS, MIXER_LAYERS
from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _grouped_style, _llama_style, _moe_style, _qwen_hybrid_style
from prepcli.models.families._grouped_style import LayerGroup
from prepcli.models.families._hybrid_style import FULL, LINEAR, layers_of_type
from prepcli.models.parameters import HFConfig, read_size


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Qwen3_5MoeTextConfig."""
    axis_sizes = _llama_style.sizes(
        config, vocab=248320, embed=2048, layers=40, heads=16, kv_heads=2, head_dim=256
    )
    return {
        **axis_sizes,
        **_qwen_hybrid_style.mixer_sizes(config),
        "mlp": read_size(config, "moe_intermediate_size", 512),
        "shared_mlp": read_size(config, "shared_expert_intermediate_size", 512),
        "experts": read_size(config, "num_experts", 256),
        "gate_up": 2,
    }


def linear_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a gated delta net."""
    return layers_of_type(_qwen_hybrid_style.layer_types(config, 40), LINEAR)


def attention_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with attention."""
    return layers_of_type(_qwen_hybrid_style.layer_types(config, 40), FULL)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, *_qwen_hybrid_style.FIELDS, "num_experts")
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _qwen_hybrid_style.arch_config(config, axis_sizes, linear_layers(config)),
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=8
        ),
    )


FAMILY = _grouped_style.build_family(
    name="qwen3_5_moe_text",
    sizes=sizes,
    arch_config=arch_config,
    layer={**_llama_style.PRE_NORMS, **_moe_style.GATED_SHARED_EXPERTS},
    groups={
        ATTENTION_LAYERS: LayerGroup(_qwen_hybrid_style.gated_attention(), attention_layers),
        MIXER_LAYERS: LayerGroup(
            _qwen_hybrid_style.gated_delta(_qwen_hybrid_style.separate_projections()),
            linear_layers,
        ),
    },
)
