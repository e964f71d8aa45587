"""Hybrid models: the parts that those with recurrent mixers share, and LFM2. No I/O, no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from prepcli.algebra.axis_map import (
    ATTENTION_LAYERS,
    DENSE_LAYERS,
    LAYERS,
    MIXER_LAYERS,
    SPARSE_LAYERS,
)
from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.core.json_values import HFConfig
from prepcli.models.architecture import read_positive
from prepcli.models.declaration import Choices, LayerGroup, LayerNumbers, Sizes, by_name
from prepcli.models.families._llama_style import (
    gated_mlp,
    llama_like,
    read_experts_per_token,
    rms_norms,
)
from prepcli.models.families._moe_style import correction, layer_sizes
from prepcli.models.mixer_config import Mixer
from prepcli.models.moe_config import Router
from prepcli.models.parameters import NEVER, Condition, Parameter, if_set, read_count, read_size
from prepcli.models.rows import (
    Parameters,
    linear,
    matrix,
    rms_norm,
    separate_qkv,
    unless_false,
)

# --- Types of layers

# With a recurrent mixer, and with attention.
LINEAR = "linear_attention"
FULL = "full_attention"
# Names in files of older versions of transformers.
OLD_LAYER_TYPES = {"mamba": LINEAR, "attention": FULL}


def read_layer_types(
    listed: Any, layers: int, names: Sequence[str], default: Callable[[int], str]
) -> tuple[str, ...]:
    """Return the type of each layer.

    Args:
        listed: The list of a config.json, or None.
        layers: Number of layers.
        names: Allowed types.
        default: Type of the layer of an index, without a list.

    Raises:
        PrepError: The list has another length or other names.
    """
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
    """Return the function to the numbers of the layers of some types.

    Args:
        read_types: Config and number of layers -> type of each layer.
        names: The types.
    """

    def numbers(config: HFConfig, layers: int) -> tuple[int, ...]:
        types = read_types(config, layers)
        return tuple(layer for layer, name in enumerate(types) if name in names)

    return numbers


def other_layers(numbers: LayerNumbers) -> LayerNumbers:
    """Return the function to the numbers of the layers that another function does not return."""

    def others(config: HFConfig, layers: int) -> tuple[int, ...]:
        listed = frozenset(numbers(config, layers))
        return tuple(layer for layer in range(layers) if layer not in listed)

    return others


# --- Groups of layers, and choices for them


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

    return {
        "mixer": mixer,
        "mixer_layers": lambda config, sizes: mixer_layers(config, sizes[LAYERS]),
    }


def sparse_groups(
    dense_mlp: Parameters, experts: Parameters, dense_layers: LayerNumbers
) -> dict[str, LayerGroup]:
    """Return the groups of layers with a dense MLP and with experts."""
    return {
        DENSE_LAYERS: LayerGroup(dense_mlp, dense_layers, may_be_all=False),
        SPARSE_LAYERS: LayerGroup(experts, other_layers(dense_layers)),
    }


def sparse_choices(dense_layers: LayerNumbers, experts_per_token: int) -> Choices:
    """Return the choices of experts in all layers but dense ones. `experts_per_token` is the default."""

    def read_dense_layers(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
        dense = dense_layers(config, sizes[LAYERS])
        # Raises PrepError if all layers are dense.
        layer_sizes(sizes[LAYERS], dense)
        return dense

    return {
        "dense_layers": read_dense_layers,
        "experts_per_token": lambda config, sizes: read_experts_per_token(
            config, sizes["experts"], experts_per_token
        ),
    }


# --- Parameters of mixers

# Dims of queries and keys, of values, and of one number per head.
QUERIES = "mixer_groups mixer_state"
VALUES = "mixer_groups group_heads mixer_head_dim"
HEADS = "mixer_groups group_heads"


def mark_part(parts: Mapping[str, str], name: str) -> str:
    """Return a dim of unequal parts with one of them marked.

    >>> mark_part({"a": "x y", "b": "z"}, "b")
    '(x y | >z)'
    """
    marked = [f">{dims}" if part == name else dims for part, dims in parts.items()]
    return f"({' | '.join(marked)})"


def convolution(
    path: str, module: str, leaf_dims: str, channels: str, bias: Condition | None
) -> Parameters:
    """Return the parameters of a causal convolution with one filter per channel.

    Args:
        path: Path in the tree.
        module: Name of the module.
        leaf_dims: Dims of the channels in the leaf.
        channels: Dim of the channels in the tensor.
        bias: When it has a bias.
    """
    parameters = {
        f"{path}.weight": Parameter(f"{leaf_dims} kernel <- {module}.weight: {channels} 1 kernel")
    }
    if bias is not NEVER:
        parameters[f"{path}.bias"] = Parameter(f"{leaf_dims} <- {module}.bias: {channels}", bias)
    return parameters


def feed_forward_experts(gate: str, up: str, down: str) -> Parameters:
    """Return the parameters of experts, by the names of matrices of the module `feed_forward.experts`.

    The alternates are the fused tensors of transformers 5.
    """
    experts = "feed_forward.experts"
    row = f"experts mlp embed <- {experts}.{{{{experts}}}}.{{}}.weight: mlp embed"
    narrow = f"experts embed mlp <- {experts}.{{experts}}.{down}.weight: embed mlp"
    fused = f"experts mlp embed <- {experts}.gate_up_proj: experts (gate_up={{}} mlp) embed"
    fused_down = f"experts embed mlp <- {experts}.down_proj: experts embed mlp"
    return {
        **matrix("mlp.gate", row.format(gate), alternate=fused.format(0)),
        **matrix("mlp.up", row.format(up), alternate=fused.format(1)),
        **matrix("mlp.down", narrow, alternate=fused_down),
    }


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


def _first_layers(config: HFConfig, layers: int) -> tuple[int, ...]:
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
        groups={
            **CONV_GROUPS,
            **sparse_groups(_lfm2_mlp("dense_mlp"), _lfm2_experts(), _first_layers),
        },
        defaults={"vocab": 65536, "embed": 2048, "mlp": 7168, "kv_heads": 8},
        more_sizes=_lfm2_moe_sizes,
        choices={
            **CONV_CHOICES,
            **sparse_choices(_first_layers, experts_per_token=4),
            # transformers adds the offset to the sum of the weights of a token, in `Lfm2MoeTopKRouter`.
            "router": lambda config, sizes: Router(
                scores="sigmoid",
                is_normalized=bool(config.get("norm_topk_prob", True)),
                scale=read_positive(config, "routed_scaling_factor", 1.0),
                weight_sum_offset=1e-6,
            ),
        },
    ),
)
