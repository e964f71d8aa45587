"""Parts that the hybrid models of Qwen share: gated delta nets, gated attention, and their sizes. No I/O, no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from prepcli.core.errors import invalid_config_error
from prepcli.models.architecture import ArchConfig
from prepcli.models.families import _hybrid_style, _llama_style
from prepcli.models.families._hybrid_style import (
    FULL,
    HEADS,
    LINEAR,
    QUERIES,
    VALUES,
    mark_part,
)
from prepcli.models.mixer_config import Mixer
from prepcli.models.parameters import HFConfig, Parameter, if_set, read_size
from prepcli.models.rows import Parameters, linear, matrix, rms_norm

MAX_POSITIONS = 32768
# Fields that these families read in addition to those of rotary embeddings.
FIELDS = ("layer_types", "attention_bias", "partial_rotary_factor")


def mixer_sizes(config: HFConfig) -> dict[str, int]:
    """Return the extents of the atoms of gated delta nets and of gated attention.

    Raises:
        PrepError: A size is invalid, or the key heads do not divide the value heads.
    """
    groups = read_size(config, "linear_num_key_heads", 16)
    heads = read_size(config, "linear_num_value_heads", 32)
    if heads % groups:
        why = f"linear_num_key_heads is {groups}, it must divide linear_num_value_heads, which is {heads}"
        raise invalid_config_error(why)
    key_dim = read_size(config, "linear_key_head_dim", 128)
    value_dim = read_size(config, "linear_value_head_dim", 128)
    return {
        "mixer_groups": groups,
        "group_heads": heads // groups,
        "mixer_state": key_dim,
        "mixer_head_dim": value_dim,
        "mixer_fused": 2 * key_dim + 2 * heads // groups * value_dim,
        "kernel": read_size(config, "linear_conv_kernel_dim", 4),
        "query_gate": 2,
        "beta_dt": 2,
    }


def layer_types(config: HFConfig, layers: int) -> tuple[str, ...]:
    """Return the type of each layer. By default every fourth one has full attention."""
    interval = read_size(config, "full_attention_interval", 4)

    def default_type(layer: int) -> str:
        return LINEAR if (layer + 1) % interval else FULL

    num_layers = read_size(config, "num_hidden_layers", layers)
    return _hybrid_style.read_layer_types(config, num_layers, (FULL, LINEAR), default_type)


def arch_config(
    config: HFConfig, axis_sizes: Mapping[str, int], linear_layers: tuple[int, ...]
) -> ArchConfig:
    """Return the architecture of the models without experts.

    Args:
        config: Content of a config.json.
        axis_sizes: Size of each named axis (atom), e.g. `{"embed": 768}`.
        linear_layers: Numbers of the layers with a gated delta net.

    Raises:
        PrepError: The config is invalid.
    """
    rope = _llama_style.read_partial_rope(
        config, axis_sizes["head_dim"], default_share=0.25, max_positions=MAX_POSITIONS
    )
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=MAX_POSITIONS, rope=rope),
        norm="rms_offset",
        mixer=Mixer("gated_delta") if linear_layers else None,
        mixer_layers=linear_layers,
    )


def gated_attention() -> Parameters:
    """Return the parameters of attention with norms, and a gate of its output in the tensor of the queries."""
    bias = if_set("attention_bias")
    query = "heads head_dim embed <- self_attn.q_proj.weight: (heads query_gate={} head_dim) embed"
    norm = "head_dim <- self_attn.{}_norm.weight: head_dim"
    key_value = "kv_heads head_dim embed <- self_attn.{}_proj.weight: (kv_heads head_dim) embed"
    out = "embed heads head_dim <- self_attn.o_proj.weight: embed (heads head_dim)"
    return {
        **linear("attn.q", query.format(0), bias),
        **linear("attn.gate", query.format(1), bias),
        **linear("attn.k", key_value.format("k"), bias),
        **linear("attn.v", key_value.format("v"), bias),
        **linear("attn.o", out, bias),
        **rms_norm("attn.q_norm", norm.format("q")),
        **rms_norm("attn.k_norm", norm.format("k")),
    }


# The channels of queries, keys and values in one tensor, in this order.
CHANNELS = {"q": QUERIES, "k": QUERIES, "v": VALUES}


def gated_delta(projections: Parameters) -> Parameters:
    """Return the parameters of a gated delta net.

    Args:
        projections: Parameters of the projections of its input.
    """
    parameters = {**projections}
    for name, leaf_dims in CHANNELS.items():
        channels = mark_part(CHANNELS, name)
        parameters |= _hybrid_style.convolution(
            f"mixer.{name}_conv", "linear_attn.conv1d", leaf_dims, channels, None
        )
    out = f"embed {VALUES} <- linear_attn.out_proj.weight: embed ({VALUES})"
    return {
        **parameters,
        "mixer.a_log.weight": Parameter(f"{HEADS} <- linear_attn.A_log: ({HEADS})"),
        "mixer.dt_bias.bias": Parameter(f"{HEADS} <- linear_attn.dt_bias: ({HEADS})"),
        **rms_norm("mixer.norm", "mixer_head_dim <- linear_attn.norm.weight: mixer_head_dim"),
        **linear("mixer.o", out, None),
    }


def separate_projections() -> Parameters:
    """Return the parameters of projections to queries, keys and values, to gates, and to strengths and time steps."""
    parameters: Parameters = {}
    for name, leaf_dims in CHANNELS.items():
        channels = mark_part(CHANNELS, name)
        parameters |= matrix(
            f"mixer.{name}",
            f"{leaf_dims} embed <- linear_attn.in_proj_qkv.weight: {channels} embed",
        )
    for name, module, dims in (("z", "z", VALUES), ("beta", "b", HEADS), ("dt", "a", HEADS)):
        parameters |= matrix(
            f"mixer.{name}", f"{dims} embed <- linear_attn.in_proj_{module}.weight: ({dims}) embed"
        )
    return parameters


# Each group of heads has its queries, keys, values and gates in one block of rows.
FUSED_PROJECTIONS: Parameters = {
    **matrix(
        "mixer.qkvz",
        "mixer_groups mixer_fused embed <- linear_attn.in_proj_qkvz.weight: (mixer_groups mixer_fused) embed",
    ),
    **matrix(
        "mixer.beta",
        f"{HEADS} embed <- linear_attn.in_proj_ba.weight: (mixer_groups beta_dt=0 group_heads) embed",
    ),
    **matrix(
        "mixer.dt",
        f"{HEADS} embed <- linear_attn.in_proj_ba.weight: (mixer_groups beta_dt=1 group_heads) embed",
    ),
}
