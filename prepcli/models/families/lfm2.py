"""LFM2: gated short convolutions in place of attention in most layers, and norms of queries and keys."""

from __future__ import annotations

import dataclasses

from prepcli.algebra.axis_map import ATTENTION_LAYERS, MIXER_LAYERS
from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _grouped_style, _hybrid_style, _llama_style
from prepcli.models.families._grouped_style import LayerGroup
from prepcli.models.mixer_config import Mixer
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rows import Parameters, linear, rms_norm, separate_qkv

CONV = "conv"
ATTENTION = "full_attention"
MAX_POSITIONS = 128_000


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Lfm2Config."""
    axis_sizes = _llama_style.sizes(
        config, vocab=65536, embed=2560, mlp=12288, layers=32, heads=32, kv_heads=8
    )
    return {**axis_sizes, **conv_sizes(config, axis_sizes["embed"]), "mlp": _mlp_width(config)}


def conv_sizes(config: HFConfig, embed: int) -> dict[str, int]:
    """Return the extents of the atoms of short convolutions."""
    return {"mixer_channels": embed, "parts": 3, "kernel": read_size(config, "conv_L_cache", 3)}


def _mlp_width(config: HFConfig) -> int:
    """Return the width of the MLP: two thirds of the field, scaled and rounded up, unless the config disables it."""
    # `block_ff_dim` is the name of the field in Liquid's own configs.
    width = read_size(config, "block_ff_dim", read_size(config, "intermediate_size", 12288))
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if config.get("block_ffn_dim_multiplier", 1.0) is not None:
        width = int(read_positive(config, "block_ffn_dim_multiplier", 1.0) * width)
        multiple = read_size(config, "block_multiple_of", 256)
        width = -(-width // multiple) * multiple
    return read_size({"intermediate_size": width}, "intermediate_size", width)


def layer_types(config: HFConfig) -> tuple[str, ...]:
    """Return the type of each layer."""
    listed = config.get("full_attn_idxs")
    if listed is not None and not isinstance(listed, list):
        why = f"full_attn_idxs is {listed!r:.60}, it must be a list of layers"
        raise invalid_config_error(why)

    def default_type(layer: int) -> str:
        if listed is None or layer in listed:
            return ATTENTION
        return CONV

    layers = read_size(config, "num_hidden_layers", 32)
    return _hybrid_style.read_layer_types(config, layers, (ATTENTION, CONV), default_type)


def conv_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a short convolution."""
    return _hybrid_style.layers_of_type(layer_types(config), CONV)


def attention_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with attention."""
    return _hybrid_style.layers_of_type(layer_types(config), ATTENTION)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "layer_types")
    return conv_arch_config(config, sizes(config))


def conv_arch_config(config: HFConfig, axis_sizes: dict[str, int]) -> ArchConfig:
    """Return the architecture that the models of the family have in common.

    Raises:
        PrepError: The config is invalid, or ties the head by one field and not by the other.
    """
    is_tied = config.get("tie_word_embeddings", True)
    if config.get("tie_embedding", is_tied) != is_tied:
        why = f"tie_embedding is {config['tie_embedding']!r:.20}, and tie_word_embeddings {is_tied!r:.20}"
        raise unsupported_config_error("tie_embedding and tie_word_embeddings differ", why)
    layers = conv_layers(config)
    arch = _llama_style.arch_config(
        config,
        axis_sizes,
        max_positions=MAX_POSITIONS,
        rope_theta=1_000_000.0,
        activation="silu",
        norm_eps=("norm_eps", 1e-5),
    )
    mixer = Mixer("short_conv") if layers else None
    return dataclasses.replace(arch, mixer=mixer, mixer_layers=layers)


# Attention has the names of LLaMA except for its output and its norms.
ATTENTION_PARAMETERS: Parameters = {
    **separate_qkv("self_attn.{}_proj", kv_heads="kv_heads"),
    **linear("attn.o", "embed heads head_dim <- self_attn.out_proj.weight: embed (heads head_dim)", None),
    **rms_norm("attn.q_norm", "head_dim <- self_attn.q_layernorm.weight: head_dim"),
    **rms_norm("attn.k_norm", "head_dim <- self_attn.k_layernorm.weight: head_dim"),
}  # fmt: skip
GROUPS = {
    ATTENTION_LAYERS: LayerGroup(ATTENTION_PARAMETERS, attention_layers),
    MIXER_LAYERS: LayerGroup(_hybrid_style.short_conv("conv", if_set("conv_bias")), conv_layers),
}
NORMS = _llama_style.rms_norms(attn_norm="operator_norm", mlp_norm="ffn_norm")
FINAL_NORM = rms_norm("final_norm", "embed <- embedding_norm.weight: embed")

FAMILY = _grouped_style.build_family(
    name="lfm2",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **NORMS,
        **linear("mlp.gate", "mlp embed <- feed_forward.w1.weight: mlp embed", None),
        **linear("mlp.up", "mlp embed <- feed_forward.w3.weight: mlp embed", None),
        **linear("mlp.down", "embed mlp <- feed_forward.w2.weight: embed mlp", None),
    },
    groups=GROUPS,
    final_norm=FINAL_NORM,
    tied_by_default=True,
)
