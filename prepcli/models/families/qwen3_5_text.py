"""Qwen3.5 (the language model): gated delta nets in three of four layers, gated attention in the fourth."""

from __future__ import annotations

from prepcli.algebra.axis_map import ATTENTION_LAYERS, MIXER_LAYERS
from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _grouped_style, _llama_style, _qwen_hybrid_style
from prepcli.models.families._grouped_style import LayerGroup
from prepcli.models.families._hybrid_style import FULL, LINEAR, layers_of_type
from prepcli.models.parameters import HFConfig


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Qwen3_5TextConfig."""
    axis_sizes = _llama_style.sizes(
        config,
        vocab=248320,
        embed=4096,
        mlp=12288,
        layers=32,
        heads=16,
        kv_heads=4,
        head_dim=256,
    )
    return {**axis_sizes, **_qwen_hybrid_style.mixer_sizes(config)}


def linear_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a gated delta net."""
    return layers_of_type(_qwen_hybrid_style.layer_types(config, layers=32), LINEAR)


def attention_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with attention."""
    return layers_of_type(_qwen_hybrid_style.layer_types(config, layers=32), FULL)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, *_qwen_hybrid_style.FIELDS)
    return _qwen_hybrid_style.arch_config(config, sizes(config), linear_layers(config))


FAMILY = _grouped_style.build_family(
    name="qwen3_5_text",
    sizes=sizes,
    arch_config=arch_config,
    layer={**_llama_style.PRE_NORMS, **_llama_style.gated_mlp()},
    groups={
        ATTENTION_LAYERS: LayerGroup(_qwen_hybrid_style.gated_attention(), attention_layers),
        MIXER_LAYERS: LayerGroup(
            _qwen_hybrid_style.gated_delta(_qwen_hybrid_style.separate_projections()),
            linear_layers,
        ),
    },
)
