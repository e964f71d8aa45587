"""Hybrid models of Qwen: gated delta nets in three of four layers, gated attention in the fourth. No I/O, no jax."""

from __future__ import annotations

from functools import partial

from prepcli.core.errors import invalid_config_error
from prepcli.core.json_values import HFConfig
from prepcli.models.declaration import Choices, Sizes, by_name
from prepcli.models.families._llama_style import (
    PRE_NORMS,
    gated_mlp,
    llama_like,
    partial_rope,
    read_experts_per_token,
)
from prepcli.models.families._moe_style import (
    DENSE_MLP,
    GATED_SHARED_EXPERTS,
    read_dense_layers_by_step,
)
from prepcli.models.families.hybrid import (
    FULL,
    HEADS,
    LINEAR,
    QUERIES,
    VALUES,
    convolution,
    layers_of,
    mark_part,
    mixer_choices,
    mixer_groups,
    read_layer_types,
    sparse_choices,
    sparse_groups,
)
from prepcli.models.mixer_config import Mixer
from prepcli.models.moe_config import Router
from prepcli.models.parameters import NEVER, Parameter, if_set, read_size
from prepcli.models.rows import Parameters, linear, matrix, rms_norm

MAX_POSITIONS = 32768

# --- Sizes and types of layers


def _mixer_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    """Return the sizes of gated delta nets and of gated attention.

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


def _expert_sizes(config: HFConfig, experts: int) -> dict[str, int]:
    """Return the sizes of experts. `experts` is the default of their number."""
    return {
        "mlp": read_size(config, "moe_intermediate_size", 512),
        "shared_mlp": read_size(config, "shared_expert_intermediate_size", 512),
        "experts": read_size(config, "num_experts", experts),
        "gate_up": 2,
    }


def _read_layer_types(config: HFConfig, layers: int) -> tuple[str, ...]:
    """Return the type of each layer. By default every fourth one has full attention."""
    interval = read_size(config, "full_attention_interval", 4)
    return read_layer_types(
        config.get("layer_types"),
        layers,
        (FULL, LINEAR),
        lambda layer: LINEAR if (layer + 1) % interval else FULL,
    )


# --- Parameters


def _gated_attention() -> Parameters:
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


def _gated_delta(projections: Parameters) -> Parameters:
    """Return the parameters of a gated delta net, from those of the projections of its input."""
    module = "linear_attn"
    parameters = {**projections}
    for name, dims in CHANNELS.items():
        channels = mark_part(CHANNELS, name)
        parameters |= convolution(f"mixer.{name}_conv", f"{module}.conv1d", dims, channels, NEVER)
    return {
        **parameters,
        "mixer.a_log.weight": Parameter(f"{HEADS} <- {module}.A_log: ({HEADS})"),
        "mixer.dt_bias.bias": Parameter(f"{HEADS} <- {module}.dt_bias: ({HEADS})"),
        **rms_norm("mixer.norm", f"mixer_head_dim <- {module}.norm.weight: mixer_head_dim"),
        **matrix("mixer.o", f"embed {VALUES} <- {module}.out_proj.weight: embed ({VALUES})"),
    }


def _separate_projections() -> Parameters:
    """Return the parameters of projections to queries, keys and values, to gates, and to strengths and time steps."""
    parameters: Parameters = {}
    for name, dims in CHANNELS.items():
        row = f"{dims} embed <- linear_attn.in_proj_qkv.weight: {mark_part(CHANNELS, name)} embed"
        parameters |= matrix(f"mixer.{name}", row)
    for name, module, dims in (("z", "z", VALUES), ("beta", "b", HEADS), ("dt", "a", HEADS)):
        row = f"{dims} embed <- linear_attn.in_proj_{module}.weight: ({dims}) embed"
        parameters |= matrix(f"mixer.{name}", row)
    return parameters


# Each group of heads has its queries, keys, values and gates in one block of rows.
QKVZ = "mixer_groups mixer_fused embed <- linear_attn.in_proj_qkvz.weight: (mixer_groups mixer_fused) embed"
BETA_DT = (
    f"{HEADS} embed <- linear_attn.in_proj_ba.weight: (mixer_groups beta_dt={{}} group_heads) embed"
)
FUSED_PROJECTIONS: Parameters = {
    **matrix("mixer.qkvz", QKVZ),
    **matrix("mixer.beta", BETA_DT.format(0)),
    **matrix("mixer.dt", BETA_DT.format(1)),
}
LINEAR_LAYERS = layers_of(_read_layer_types, LINEAR)
QWEN3_5_GROUPS = mixer_groups(
    _gated_attention(), _gated_delta(_separate_projections()), LINEAR_LAYERS
)
CHOICES: Choices = {
    "norm": "rms_offset",
    **mixer_choices(lambda config: Mixer("gated_delta"), LINEAR_LAYERS),
}
_qwen_like = partial(llama_like, positions=MAX_POSITIONS, rope=partial_rope(0.25, MAX_POSITIONS))

FAMILIES = by_name(
    _qwen_like(
        "qwen3_next",
        "Qwen3-Next: gated delta nets and gated attention, with experts in place of most MLPs.",
        layer=PRE_NORMS,
        groups={
            **mixer_groups(_gated_attention(), _gated_delta(FUSED_PROJECTIONS), LINEAR_LAYERS),
            **sparse_groups(DENSE_MLP, GATED_SHARED_EXPERTS, read_dense_layers_by_step),
        },
        defaults={
            **{"vocab": 151_936, "embed": 2048, "mlp": 5632, "layers": 48},
            **{"heads": 16, "kv_heads": 2, "head_dim": 256},
        },
        more_sizes=lambda config, sizes: {
            **_mixer_sizes(config, sizes),
            "dense_mlp": sizes["mlp"],
            **_expert_sizes(config, experts=512),
        },
        choices={
            **CHOICES,
            **sparse_choices(read_dense_layers_by_step, experts_per_token=10),
            "router": lambda config, sizes: Router(
                is_normalized=bool(config.get("norm_topk_prob", True))
            ),
        },
    ),
    _qwen_like(
        "qwen3_5_text",
        "Qwen3.5 (the language model): gated delta nets in three of four layers, gated attention in the fourth.",
        layer={**PRE_NORMS, **gated_mlp()},
        groups=QWEN3_5_GROUPS,
        defaults={"vocab": 248_320, "mlp": 12288, "heads": 16, "kv_heads": 4, "head_dim": 256},
        more_sizes=_mixer_sizes,
        choices=CHOICES,
    ),
    _qwen_like(
        "qwen3_5_moe_text",
        "Qwen3.5-MoE (the language model): the layers of Qwen3.5, with experts in place of the MLP.",
        layer={**PRE_NORMS, **GATED_SHARED_EXPERTS},
        groups=QWEN3_5_GROUPS,
        defaults={
            **{"vocab": 248_320, "embed": 2048, "layers": 40},
            **{"heads": 16, "kv_heads": 2, "head_dim": 256},
        },
        more_sizes=lambda config, sizes: {
            **_mixer_sizes(config, sizes),
            **_expert_sizes(config, experts=256),
        },
        choices={
            **CHOICES,
            "experts_per_token": lambda config, sizes: read_experts_per_token(
                config, sizes["experts"], default=8
            ),
        },
    ),
)
