"""Bamba: Mamba-2 in most layers, attention in some, and an MLP in each."""

from __future__ import annotations

import dataclasses

from prepcli.algebra.axis_map import ATTENTION_LAYERS, MIXER_LAYERS
from prepcli.core.errors import invalid_config_error
from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _grouped_style, _hybrid_style, _llama_style
from prepcli.models.families._grouped_style import LayerGroup
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rows import Parameters, linear, unless_false

MAX_POSITIONS = 262_144
# BambaConfig sets it, whatever config.json has.
ROTARY_SHARE = 0.5


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of BambaConfig."""
    axis_sizes = _llama_style.sizes(
        config, vocab=128000, embed=4096, mlp=14336, layers=32, heads=32, kv_heads=8
    )
    return {**axis_sizes, **mixer_sizes(config, axis_sizes["embed"])}


def mixer_sizes(config: HFConfig, embed: int) -> dict[str, int]:
    """Return the extents of the atoms of Mamba-2."""
    return _hybrid_style.read_mamba2_sizes(
        config,
        embed=embed * read_size(config, "mamba_expand", 2),
        heads=("mamba_n_heads", 128),
        head_dim=("mamba_d_head", None),
        groups=("mamba_n_groups", 1),
        state=("mamba_d_state", 256),
        kernel=("mamba_d_conv", 4),
    )


def attention_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with attention.

    Raises:
        PrepError: `attn_layer_indices` is not a list.
    """
    listed = config.get("attn_layer_indices") or []
    if not isinstance(listed, list):
        why = f"attn_layer_indices is {listed!r:.60}, it must be a list of layers"
        raise invalid_config_error(why)
    return tuple(
        layer for layer in range(read_size(config, "num_hidden_layers", 32)) if layer in listed
    )


def mixer_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with Mamba-2."""
    others = attention_layers(config)
    return tuple(
        layer for layer in range(read_size(config, "num_hidden_layers", 32)) if layer not in others
    )


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *ROPE_FIELDS, "attention_bias", "mlp_bias", "partial_rotary_factor"
    )
    axis_sizes = sizes(config)
    rope = _llama_style.read_partial_rope(
        {**config, "partial_rotary_factor": ROTARY_SHARE},
        axis_sizes["head_dim"],
        default_share=ROTARY_SHARE,
        max_positions=MAX_POSITIONS,
    )
    layers = mixer_layers(config)
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            axis_sizes,
            max_positions=MAX_POSITIONS,
            rope=rope,
            norm_eps=("rms_norm_eps", 1e-5),
        ),
        mixer=_hybrid_style.read_mamba2(config) if layers else None,
        mixer_layers=layers,
    )


MLP_BIAS = if_set("mlp_bias")
MIXER: Parameters = _hybrid_style.mamba2(
    "mamba",
    bias=if_set("mamba_proj_bias"),
    out_bias=if_set("mamba_proj_bias"),
    conv_bias=unless_false("mamba_conv_bias"),
)

FAMILY = _grouped_style.build_family(
    name="bamba",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.rms_norms(attn_norm="input_layernorm", mlp_norm="pre_ff_layernorm"),
        **linear("mlp.gate", "mlp embed <- feed_forward.gate_proj.weight: mlp embed", MLP_BIAS),
        **linear("mlp.up", "mlp embed <- feed_forward.up_proj.weight: mlp embed", MLP_BIAS),
        **linear("mlp.down", "embed mlp <- feed_forward.down_proj.weight: embed mlp", MLP_BIAS),
    },
    groups={
        ATTENTION_LAYERS: LayerGroup(
            _llama_style.attention(
                bias=if_set("attention_bias"), out_bias=if_set("attention_bias")
            ),
            attention_layers,
        ),
        MIXER_LAYERS: LayerGroup(MIXER, mixer_layers),
    },
    final_norm=_llama_style.rms_norm("final_norm", "embed <- final_layernorm.weight: embed"),
)
