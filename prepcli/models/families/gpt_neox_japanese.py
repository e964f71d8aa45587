"""GPT-NeoX Japanese: sequential GPT-NeoX without biases, but for one after the attention of the last layer."""

from __future__ import annotations

import dataclasses

from prepcli.algebra.axis_map import BIASED_LAYERS, UNBIASED_LAYERS
from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _gpt_style, _grouped_style, _llama_style, gpt_neox
from prepcli.models.families._grouped_style import LayerGroup
from prepcli.models.parameters import NEVER, HFConfig, Parameter, read_size
from prepcli.models.rows import fused_qkv, layer_norm, matrix


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GPTNeoXJapaneseConfig."""
    axis_sizes = _gpt_style.sizes(
        config, vocab=32000, positions=2048, embed=2560, layers=32, heads=32, field_names={}
    )
    multiple = read_size(config, "intermediate_multiple_size", 4)
    return {**axis_sizes, "mlp": axis_sizes["embed"] * multiple}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "rotary_pct", "partial_rotary_factor")
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _gpt_style.arch_config(config, axis_sizes, activation=("hidden_act", "gelu")),
        norm_eps=read_positive(config, "layer_norm_eps", 1e-5),
        rope=gpt_neox.read_neox_rope(config, axis_sizes, default_share=1.0),
        shape_groups=_shape_groups(config),
    )


def _last_layer(config: HFConfig) -> tuple[int, ...]:
    return (sizes(config)["layers"] - 1,)


def _other_layers(config: HFConfig) -> tuple[int, ...]:
    return tuple(range(sizes(config)["layers"] - 1))


def _shape_groups(config: HFConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the groups of layers without and with a bias, each with its layers. A model of one layer has no groups."""
    others = _other_layers(config)
    if not others:
        return ()
    return ((UNBIASED_LAYERS, others), (BIASED_LAYERS, _last_layer(config)))


ATTENTION = {
    **fused_qkv("attention.query_key_value", "(heads qkv={} head_dim) embed", NEVER),
    **matrix("attn.o", "embed heads head_dim <- attention.dense.weight: embed (heads head_dim)"),
}
BIAS = {"attn.o.bias": Parameter("embed <- attention.dense_bias: embed")}
FAMILY = _grouped_style.build_family(
    name="gpt_neox_japanese",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=True,
    prefix="gpt_neox_japanese.",
    tokens="embed_in.weight",
    layer={
        **_llama_style.PRE_LAYER_NORMS,
        **matrix("mlp.up", "mlp embed <- mlp.dense_h_to_4h.weight: mlp embed"),
        **matrix("mlp.down", "embed mlp <- mlp.dense_4h_to_h.weight: embed mlp"),
    },
    groups={
        UNBIASED_LAYERS: LayerGroup(ATTENTION, _other_layers, may_be_all=False),
        BIASED_LAYERS: LayerGroup({**ATTENTION, **BIAS}, _last_layer),
    },
    final_norm=layer_norm("final_norm", "embed <- final_layer_norm.weight: embed"),
    head=matrix("head", "vocab embed <- embed_out.weight: vocab embed"),
    dropped={
        **_gpt_style.mask_buffers("layers.{i}.attention"),
        "layers.{i}.attention.rotary_emb.inv_freq": "rotary frequencies, computed from the config",
    },
    dropout_fields=DropoutFields(
        attention=("attention_dropout", 0.1), residual=("hidden_dropout", 0.0)
    ),
)
