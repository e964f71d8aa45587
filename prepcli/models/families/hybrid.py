"""Hybrid models: common parts of models with recurrent mixers, LFM2, and the hybrids of Qwen. No I/O, no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from prepcli.algebra.axis_map import (
    ATTENTION_LAYERS,
    LAYERS,
    MIXER_LAYERS,
)
from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.core.json_values import HFConfig
from prepcli.models.architecture import read_positive
from prepcli.models.declaration import (
    Choices,
    LayerGroup,
    LayerNumbers,
    Parameters,
    Sizes,
    by_name,
    linear,
    mark_part,
    matrix,
    rms_norm,
    separate_qkv,
    unless_false,
)
from prepcli.models.families._llama_style import (
    PRE_NORMS,
    gated_mlp,
    llama_like,
    partial_rope,
    read_experts_per_token,
    rms_norms,
)
from prepcli.models.families._moe_style import (
    GATED_SHARED_EXPERTS,
    correction,
    dense_and_sparse_layers,
    expert_matrices,
    read_dense_layers_by_step,
)
from prepcli.models.layer_config import Mixer, Router
from prepcli.models.parameters import NEVER, Condition, Parameter, if_set, read_count, read_size

# --- Types of layers, and groups of them

# Layers with a recurrent mixer, and with attention.
LINEAR = "linear_attention"
FULL = "full_attention"
# Names in files of older versions of transformers.
OLD_LAYER_TYPES = {"mamba": LINEAR, "attention": FULL}


def read_layer_types(
    listed: Any, layers: int, names: Sequence[str], default: Callable[[int], str]
) -> tuple[str, ...]:
    """Return the type of each layer: from the list in a config, or the default of its number."""
    if listed is None:
        listed = [default(layer) for layer in range(layers)]
    if isinstance(listed, list):
        listed = [OLD_LAYER_TYPES.get(name, name) if type(name) is str else name for name in listed]
    is_valid = isinstance(listed, list) and all(name in names for name in listed)
    if not is_valid or len(listed) != layers:
        why = f"layer_types gives the layers {listed!r:.80}, it must give {layers} of {' and '.join(names)}"
        raise invalid_config_error(why)
    return tuple(listed)


def layers_of(read_types: Callable[[HFConfig, int], Sequence[str]], *names: str) -> LayerNumbers:
    """Return the reader of the layers of some types, from the reader of the type of each layer."""

    def read(config: HFConfig, layers: int) -> tuple[int, ...]:
        types = read_types(config, layers)
        return tuple(layer for layer, name in enumerate(types) if name in names)

    return read


def other_layers(numbers: LayerNumbers) -> LayerNumbers:
    """Return the reader of the layers that another reader does not return."""

    def read(config: HFConfig, layers: int) -> tuple[int, ...]:
        listed = frozenset(numbers(config, layers))
        return tuple(layer for layer in range(layers) if layer not in listed)

    return read


def layer_choice(numbers: LayerNumbers) -> Callable[[HFConfig, Sizes], tuple[int, ...]]:
    """Return the choice of some layers."""
    return lambda config, sizes: numbers(config, sizes[LAYERS])


def mixer_groups(
    attention: Parameters, mixer: Parameters, mixer_layers: LayerNumbers
) -> dict[str, LayerGroup]:
    """Return the groups of layers with attention and with a mixer."""
    return {
        ATTENTION_LAYERS: LayerGroup(attention, other_layers(mixer_layers)),
        MIXER_LAYERS: LayerGroup(mixer, mixer_layers),
    }


def mixer_choices(read_mixer: Callable[[HFConfig], Mixer], mixer_layers: LayerNumbers) -> Choices:
    """Return the choices of a mixer in some layers, or in none."""

    def mixer(config: HFConfig, sizes: Sizes) -> Mixer | None:
        return read_mixer(config) if mixer_layers(config, sizes[LAYERS]) else None

    return {"mixer": mixer, "mixer_layers": layer_choice(mixer_layers)}


def sparse_choices(dense_layers: LayerNumbers, per_token: int) -> Choices:
    """Return the choices of experts in some layers, `per_token` of them for a token by default."""
    return {
        "dense_layers": lambda config, sizes: dense_layers(config, sizes[LAYERS]),
        **experts_choice(per_token),
    }


def experts_choice(per_token: int) -> Choices:
    """Return the choice of the number of experts per token, from its default."""
    return {
        "experts_per_token": lambda config, sizes: read_experts_per_token(
            config, sizes["experts"], per_token
        )
    }


# --- Parameters of mixers and experts

# Dims of queries and keys, of values, and of one number per head.
QUERIES = "mixer_groups mixer_state"
VALUES = "mixer_groups group_heads mixer_head_dim"
HEADS = "mixer_groups group_heads"


def convolution(
    path: str, module: str, leaf_dims: str, channels: str, bias: Condition | None
) -> Parameters:
    """Return the parameters of a causal convolution with one filter per channel.

    `leaf_dims` and `channels` are the dims of the channels in the leaf and in the tensor.
    """
    weight = f"{leaf_dims} kernel <- {module}.weight: {channels} 1 kernel"
    if bias is None:
        return matrix(path, weight)
    row = f"{leaf_dims} <- {module}.bias: {channels}"
    return {**matrix(path, weight), f"{path}.bias": Parameter(row, bias)}


def feed_forward_experts(gate: str, up: str, down: str) -> Parameters:
    """Return the matrices of experts of the module `feed_forward`."""
    return expert_matrices("feed_forward.experts", (gate, up, down), "feed_forward.experts")


# --- LFM2

CONV = "conv"
LFM2_NORMS = rms_norms(attn_norm="operator_norm", mlp_norm="ffn_norm")
# Attention has the names of LLaMA except for its output and its norms.
LFM2_ATTENTION: Parameters = {
    **separate_qkv("self_attn.{}_proj", kv_heads="kv_heads"),
    **matrix("attn.o", "embed heads head_dim <- self_attn.out_proj.weight: embed (heads head_dim)"),
    **rms_norm("attn.q_norm", "head_dim <- self_attn.q_layernorm.weight: head_dim"),
    **rms_norm("attn.k_norm", "head_dim <- self_attn.k_layernorm.weight: head_dim"),
}


def _lfm2_mlp(mlp: str) -> Parameters:
    """Return the parameters of a dense MLP, by the atom of its hidden units."""
    return gated_mlp(module="feed_forward", names=("w1", "w3", "w2"), mlp=mlp)


def _short_conv() -> Parameters:
    """Return the parameters of a gated short convolution."""
    bias = if_set("conv_bias")
    fused = "mixer_channels embed <- conv.in_proj.weight: (parts={} mixer_channels) embed"
    output = "embed mixer_channels <- conv.out_proj.weight: embed mixer_channels"
    return {
        **linear("mixer.b", fused.format(0), bias),
        **linear("mixer.c", fused.format(1), bias),
        **linear("mixer.v", fused.format(2), bias),
        **convolution("mixer.v_conv", "conv.conv", "mixer_channels", "mixer_channels", bias),
        **linear("mixer.o", output, bias),
    }


def _lfm2_experts() -> Parameters:
    bias = dataclasses.replace(
        correction("feed_forward.expert_bias: experts"), condition=unless_false("use_expert_bias")
    )
    return {
        **matrix("mlp.router", "experts embed <- feed_forward.gate.weight: experts embed"),
        "mlp.router.correction.bias": bias,
        **feed_forward_experts("w1", "w3", "w2"),
    }


def _conv_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    kernel = read_size(config, "conv_L_cache", 3)
    return {"mixer_channels": sizes["embed"], "parts": 3, "kernel": kernel}


def _lfm2_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    """Return the sizes. The MLP has two thirds of the field, scaled and rounded up, unless the config disables it."""
    # `block_ff_dim` is the name of the field in Liquid's own configs.
    width = read_size(config, "block_ff_dim", sizes["mlp"])
    if config.get("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        if config.get("block_ffn_dim_multiplier", 1.0) is not None:
            width = int(read_positive(config, "block_ffn_dim_multiplier", 1.0) * width)
            multiple = read_size(config, "block_multiple_of", 256)
            width = -(-width // multiple) * multiple
    # The result is in the range of a size too.
    width = read_size({"intermediate_size": width}, "intermediate_size", width)
    return {**_conv_sizes(config, sizes), "mlp": width}


def _lfm2_moe_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    return {
        **_conv_sizes(config, sizes),
        "mlp": read_size(config, "moe_intermediate_size", 1792),
        "dense_mlp": sizes["mlp"],
        "experts": read_size(config, "num_experts", 32),
        "gate_up": 2,
    }


def _lfm2_layer_types(config: HFConfig, layers: int) -> tuple[str, ...]:
    listed = config.get("full_attn_idxs")
    if listed is not None and not isinstance(listed, list):
        why = f"full_attn_idxs is {listed!r:.60}, it must be a list of layers"
        raise invalid_config_error(why)
    attention = range(layers) if listed is None else listed
    return read_layer_types(
        config.get("layer_types"),
        layers,
        (FULL, CONV),
        lambda layer: FULL if layer in attention else CONV,
    )


def _first_dense_layers(config: HFConfig, layers: int) -> tuple[int, ...]:
    return tuple(range(min(read_count(config, "num_dense_layers", 2), layers)))


def _check_tying(config: HFConfig, sizes: Sizes) -> None:
    is_tied = config.get("tie_word_embeddings", True)
    if config.get("tie_embedding", is_tied) != is_tied:
        why = f"tie_embedding is {config['tie_embedding']!r:.20}, and tie_word_embeddings {is_tied!r:.20}"
        raise unsupported_config_error("tie_embedding and tie_word_embeddings differ", why)


CONV_LAYERS = layers_of(_lfm2_layer_types, CONV)
CONV_GROUPS = mixer_groups(LFM2_ATTENTION, _short_conv(), CONV_LAYERS)
CONV_CHOICES = mixer_choices(lambda config: Mixer("short_conv"), CONV_LAYERS)
_lfm2_like = partial(
    llama_like,
    positions=128_000,
    rope_theta=1_000_000.0,
    activation_field=None,
    norm_eps=1e-5,
    norm_eps_field="norm_eps",
    final_norm=rms_norms(final_norm="embedding_norm"),
    check=_check_tying,
    tied=True,
)

# --- Qwen

QWEN_POSITIONS = 32768


def _delta_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    """Return the sizes of gated delta nets and of gated attention."""
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


def _read_qwen_types(config: HFConfig, layers: int) -> tuple[str, ...]:
    """Return the type of each layer. By default every fourth one has full attention."""
    interval = read_size(config, "full_attention_interval", 4)
    return read_layer_types(
        config.get("layer_types"),
        layers,
        (FULL, LINEAR),
        lambda layer: LINEAR if (layer + 1) % interval else FULL,
    )


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
    """Return the parameters of a gated delta net, from the parameters of the projections of its input."""
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
DELTA_LAYERS = layers_of(_read_qwen_types, LINEAR)
QWEN3_5_GROUPS = mixer_groups(
    _gated_attention(), _gated_delta(_separate_projections()), DELTA_LAYERS
)
DELTA_CHOICES: Choices = {
    "norm": "rms_offset",
    **mixer_choices(lambda config: Mixer("gated_delta"), DELTA_LAYERS),
}
_qwen_like = partial(llama_like, positions=QWEN_POSITIONS, rope=partial_rope(0.25, QWEN_POSITIONS))

FAMILIES = by_name(
    _lfm2_like(
        "lfm2",
        "LFM2: gated short convolutions in place of attention in most layers, and norms of queries and keys.",
        layer={**LFM2_NORMS, **_lfm2_mlp("mlp")},
        groups=CONV_GROUPS,
        defaults={"vocab": 65536, "embed": 2560, "mlp": 12288, "kv_heads": 8},
        more_sizes=_lfm2_sizes,
        choices=CONV_CHOICES,
    ),
    _lfm2_like(
        "lfm2_moe",
        "LFM2-MoE: LFM2 with experts in all layers but the first ones, chosen by corrected sigmoid scores.",
        layer=LFM2_NORMS,
        groups={**CONV_GROUPS, **dense_and_sparse_layers(_first_dense_layers, _lfm2_experts(), _lfm2_mlp("dense_mlp"))},
        defaults={"vocab": 65536, "embed": 2048, "mlp": 7168, "kv_heads": 8},
        more_sizes=_lfm2_moe_sizes,
        choices={
            **CONV_CHOICES,
            **sparse_choices(_first_dense_layers, 4),
            # transformers adds the offset to the sum of the weights of a token, in `Lfm2MoeTopKRouter`.
            "router": lambda config, sizes: Router(
                scores="sigmoid",
                is_normalized=bool(config.get("norm_topk_prob", True)),
                scale=read_positive(config, "routed_scaling_factor", 1.0),
                weight_sum_offset=1e-6,
            ),
        },
    ),
    _qwen_like(
        "qwen3_next",
        "Qwen3-Next: gated delta nets and gated attention, with experts in place of most MLPs.",
        layer=PRE_NORMS,
        groups={
            **mixer_groups(_gated_attention(), _gated_delta(FUSED_PROJECTIONS), DELTA_LAYERS),
            **dense_and_sparse_layers(read_dense_layers_by_step, GATED_SHARED_EXPERTS),
        },
        defaults={
            **{"vocab": 151_936, "embed": 2048, "mlp": 5632, "layers": 48},
            **{"heads": 16, "kv_heads": 2, "head_dim": 256},
        },
        more_sizes=lambda config, sizes: {
            **_delta_sizes(config, sizes),
            "dense_mlp": sizes["mlp"],
            **_expert_sizes(config, experts=512),
        },
        choices={
            **DELTA_CHOICES,
            **sparse_choices(read_dense_layers_by_step, 10),
            "router": lambda config, sizes: Router(is_normalized=bool(config.get("norm_topk_prob", True))),
        },
    ),
    _qwen_like(
        "qwen3_5_text",
        "Qwen3.5 (the language model): gated delta nets in three of four layers, gated attention in the fourth.",
        layer={**PRE_NORMS, **gated_mlp()},
        groups=QWEN3_5_GROUPS,
        defaults={"vocab": 248_320, "mlp": 12288, "heads": 16, "kv_heads": 4, "head_dim": 256},
        more_sizes=_delta_sizes,
        choices=DELTA_CHOICES,
    ),
    _qwen_like(
        "qwen3_5_moe_text",
        "Qwen3.5-MoE (the language model): the layers of Qwen3.5, with experts in place of the MLP.",
        layer={**PRE_NORMS, **GATED_SHARED_EXPERTS},
        groups=QWEN3_5_GROUPS,
        defaults={**{"vocab": 248_320, "embed": 2048, "layers": 40}, **{"heads": 16, "kv_heads": 2, "head_dim": 256}},
        more_sizes=lambda config, sizes: {**_delta_sizes(config, sizes), **_expert_sizes(config, experts=256)},
        choices={**DELTA_CHOICES, **experts_choice(8)},
    ),
)  # fmt: skip
