"""Parts that families with recurrent mixers share: layer types, rows of mixers, whole models. No I/O, no jax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models import rows
from prepcli.models.architecture import (
    FULL_ATTENTION,
    ArchConfig,
    read_activation,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style
from prepcli.models.mixer_config import InitialSteps, Mixer
from prepcli.models.parameters import Family, HFConfig, Parameter, read_size
from prepcli.models.rows import Parameters, embedding, linear, rms_norm, stack

# Types of layers: with a recurrent mixer, and with attention.
LINEAR = "linear_attention"
FULL = "full_attention"
# Names of layer types in files of older versions of transformers.
OLD_LAYER_TYPES = {"mamba": LINEAR, "attention": FULL}

# transformers 5 writes infinity so, which JSON lacks.
INFINITY = {"__float__": "Infinity"}


def read_layer_types(
    config: HFConfig, layers: int, names: Sequence[str], default: Callable[[int], str]
) -> tuple[str, ...]:
    """Return the type of each layer.

    Args:
        config: Content of a config.json.
        layers: Number of layers.
        names: Allowed types.
        default: Type of the layer of an index, for configs without `layer_types`.

    Raises:
        PrepError: The list has another length or other names.
    """
    listed: Any = config.get("layer_types")
    if listed is None:
        listed = [default(layer) for layer in range(layers)]
    if isinstance(listed, list):
        listed = [OLD_LAYER_TYPES.get(name, name) if type(name) is str else name for name in listed]
    is_valid = isinstance(listed, list) and all(name in names for name in listed)
    if not is_valid or len(listed) != layers:
        why = f"layer_types gives the layers {listed!r:.80}, it must give {layers} of {' and '.join(names)}"
        raise invalid_config_error(why)
    return tuple(listed)


def layers_of_type(layer_types: Sequence[str], name: str) -> tuple[int, ...]:
    """Return the numbers of the layers of a type."""
    return tuple(layer for layer, listed in enumerate(layer_types) if listed == name)


def short_conv(module: str, bias: rows.Condition) -> Parameters:
    """Return the parameters of a gated short convolution.

    Args:
        module: Name of the module.
        bias: When its projections and its convolution have a bias.
    """
    fused = f"mixer_channels embed <- {module}.in_proj.weight: (parts={{}} mixer_channels) embed"
    return {
        **linear("mixer.b", fused.format(0), bias),
        **linear("mixer.c", fused.format(1), bias),
        **linear("mixer.v", fused.format(2), bias),
        **convolution("mixer.v_conv", f"{module}.conv", "mixer_channels", "mixer_channels", bias),
        **linear("mixer.o", f"embed mixer_channels <- {module}.out_proj.weight: embed mixer_channels", bias),
    }  # fmt: skip


def convolution(
    path: str, module: str, leaf_dims: str, channels: str, bias: rows.Condition | None
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
    if bias is not None:
        parameters[f"{path}.bias"] = Parameter(f"{leaf_dims} <- {module}.bias: {channels}", bias)
    return parameters


QUERIES = "mixer_groups mixer_state"
VALUES = "mixer_groups group_heads mixer_head_dim"
HEADS = "mixer_groups group_heads"


def mamba2(
    module: str,
    *,
    bias: rows.Condition | None,
    out_bias: rows.Condition | None,
    conv_bias: rows.Condition,
    norm: rows.Condition = rows.ALWAYS,
) -> Parameters:
    """Return the parameters of Mamba-2.

    Args:
        module: Name of the module.
        bias: When its input projection has a bias.
        out_bias: When its output projection has a bias.
        conv_bias: When its convolution has a bias.
        norm: When it has a norm.
    """
    # One tensor has gates, values, keys, queries and steps, in this order.
    projections = {"z": VALUES, "v": VALUES, "k": QUERIES, "q": QUERIES, "dt": HEADS}
    channels = {"v": VALUES, "k": QUERIES, "q": QUERIES}
    parameters: Parameters = {}
    for name, dims in projections.items():
        part = mark_part(projections, name)
        row = f"{dims} embed <- {module}.in_proj.weight: {part} embed"
        parameters |= linear(f"mixer.{name}", row, bias)
    for name, dims in channels.items():
        part = mark_part(channels, name)
        parameters |= convolution(f"mixer.{name}_conv", f"{module}.conv1d", dims, part, conv_bias)
    out = f"embed {VALUES} <- {module}.out_proj.weight: embed ({VALUES})"
    return {
        **parameters,
        "mixer.a_log.weight": Parameter(f"{HEADS} <- {module}.A_log: ({HEADS})"),
        "mixer.d.weight": Parameter(f"{HEADS} <- {module}.D: ({HEADS})"),
        "mixer.dt_bias.bias": Parameter(f"{HEADS} <- {module}.dt_bias: ({HEADS})"),
        "mixer.norm.scale": Parameter(f"{VALUES} <- {module}.norm.weight: ({VALUES})", norm),
        **linear("mixer.o", out, out_bias),
    }


def mamba(module: str, *, bias: rows.Condition | None, conv_bias: rows.Condition) -> Parameters:
    """Return the parameters of Mamba.

    Args:
        module: Name of the module.
        bias: When its projections of hidden states have a bias.
        conv_bias: When its convolution has a bias.
    """
    fused = f"mixer_channels embed <- {module}.in_proj.weight: (parts={{}} mixer_channels) embed"
    selections = {"dt_down": "dt_rank", "k": "mixer_state", "q": "mixer_state"}
    parameters: Parameters = {}
    for name, dim in selections.items():
        part = mark_part(selections, name)
        row = f"{dim} mixer_channels <- {module}.x_proj.weight: {part} mixer_channels"
        parameters |= rows.matrix(f"mixer.{name}", row)
    steps = f"mixer_channels dt_rank <- {module}.dt_proj.weight: mixer_channels dt_rank"
    rates = f"mixer_channels mixer_state <- {module}.A_log: mixer_channels mixer_state"
    return {
        **linear("mixer.v", fused.format(0), bias),
        **linear("mixer.z", fused.format(1), bias),
        **convolution("mixer.v_conv", f"{module}.conv1d", "mixer_channels", "mixer_channels", conv_bias),
        **parameters,
        **linear("mixer.dt_up", steps),
        "mixer.a_log.weight": Parameter(rates),
        "mixer.d.weight": Parameter(f"mixer_channels <- {module}.D: mixer_channels"),
        **linear("mixer.o", f"embed mixer_channels <- {module}.out_proj.weight: embed mixer_channels", bias),
    }  # fmt: skip


def read_mamba_sizes(
    config: HFConfig,
    *,
    embed: int,
    channels: int,
    state: tuple[str, int],
    kernel: tuple[str, int],
    rank: str,
) -> dict[str, int]:
    """Return the extents of the atoms of Mamba.

    Args:
        config: Content of a config.json.
        embed: Width of the layers.
        channels: Number of channels.
        state: Config field of the width of queries and keys, and its default.
        kernel: The same for the number of taps of the convolution.
        rank: Config field of the rank of the steps. Absent or "auto" means a sixteenth of `embed`.

    Raises:
        PrepError: A size is invalid.
    """
    dt_rank = math.ceil(embed / 16)
    if config.get(rank) != "auto":
        dt_rank = read_size(config, rank, dt_rank)
    return {
        "mixer_channels": channels,
        "mixer_state": read_size(config, *state),
        "kernel": read_size(config, *kernel),
        "dt_rank": dt_rank,
        "parts": 2,
    }


def read_initial_steps(config: HFConfig) -> InitialSteps:
    """Return the initial steps of Mamba or Mamba-2.

    Raises:
        PrepError: A bound is not a positive number, the floor is negative, or the bounds are in the wrong order.
    """
    minimum = read_positive(config, "time_step_min", 0.001)
    maximum = read_positive(config, "time_step_max", 0.1)
    if minimum > maximum:
        why = (
            f"time_step_min is {minimum:g}, it must be at most time_step_max, which is {maximum:g}"
        )
        raise invalid_config_error(why)
    floor = 0.0
    # A floor of 0 means no floor.
    if config.get("time_step_floor") != 0:
        floor = read_positive(config, "time_step_floor", 1e-4)
    return InitialSteps(minimum=minimum, maximum=maximum, floor=floor)


def reject_rescaled_outputs(config: HFConfig) -> None:
    """Raise PrepError if transformers would divide the stored output projections by a number when it loads them."""
    if config.get("rescale_prenorm_residual"):
        why = "transformers 5 divides stored output projections by sqrt(num_hidden_layers) when it loads them"
        raise unsupported_config_error("rescale_prenorm_residual=true is not supported", why)


def mark_part(parts: Mapping[str, str], name: str) -> str:
    """Return a dim of unequal parts with one of them marked.

    >>> mark_part({"a": "x y", "b": "z"}, "b")
    '(x y | >z)'
    """
    marked = [f">{dims}" if part == name else dims for part, dims in parts.items()]
    return f"({' | '.join(marked)})"


def read_mamba2_sizes(
    config: HFConfig,
    *,
    embed: int,
    heads: tuple[str, int],
    head_dim: tuple[str, int | None],
    groups: tuple[str, int],
    state: tuple[str, int],
    kernel: tuple[str, int],
) -> dict[str, int]:
    """Return the extents of the atoms of Mamba-2.

    Args:
        config: Content of a config.json.
        embed: Width of the layers times the expansion. It is the width of all heads together.
        heads: Config field of the number of heads, and its default, like the following fields.
        head_dim: Of the width of a head. The default None means that the heads share `embed`.
        groups: Of the number of groups of heads.
        state: Of the width of queries and keys.
        kernel: Of the number of taps of the convolution.

    Raises:
        PrepError: A size is invalid, or the sizes do not agree.
    """
    num_heads = read_size(config, *heads)
    num_groups = read_size(config, *groups)
    field, default = head_dim
    if config.get(field) == "auto" or (default is None and config.get(field) is None):
        width = embed // num_heads
    else:
        width = read_size(config, field, default or 1)
    if num_heads * width != embed:
        why = f"{num_heads} heads of {width} elements do not make up the expanded width {embed}"
        raise invalid_config_error(why)
    if num_heads % num_groups:
        why = f"{groups[0]} is {num_groups}, it must divide {heads[0]}, which is {num_heads}"
        raise invalid_config_error(why)
    return {
        "mixer_groups": num_groups,
        "group_heads": num_heads // num_groups,
        "mixer_state": read_size(config, *state),
        "mixer_head_dim": width,
        "kernel": read_size(config, *kernel),
    }


def read_mamba2(config: HFConfig) -> Mixer:
    """Return the Mamba-2 mixer of a config.

    Raises:
        PrepError: `time_step_limit` is not a pair of numbers.
    """
    stored: Any = config.get("time_step_limit")
    if stored is None:
        return Mixer("mamba2")
    limits: list[Any] = []
    if isinstance(stored, list | tuple):
        limits = [math.inf if limit == INFINITY else limit for limit in stored]
    if len(limits) != 2 or not all(type(limit) in (int, float) for limit in limits):
        raise invalid_config_error(f"time_step_limit is {stored!r:.60}, it must be two numbers")
    return Mixer("mamba2", dt_limits=(float(limits[0]), float(limits[1])))


def mixer_arch_config(config: HFConfig, layers: int, mixer: Mixer) -> ArchConfig:
    """Return the architecture of a model with only recurrent mixers (Mamba, Mamba-2).

    Args:
        config: Content of a config.json.
        layers: Number of layers.
        mixer: The mixer of each layer.

    Raises:
        PrepError: The config is invalid or not supported.
    """
    reject_unsupported_fields(config)
    reject_rescaled_outputs(config)
    return ArchConfig(
        norm="rms",
        norm_eps=read_positive(config, "layer_norm_epsilon", 1e-5),
        activation=read_activation(config, "hidden_act", "silu"),
        has_gated_mlp=False,
        attn_scale=1.0,
        sliding_windows=(FULL_ATTENTION,) * layers,
        rope=None,
        max_positions=0,
        init_std=read_positive(config, "initializer_range", 0.1),
        mixer=mixer,
        mixer_layers=tuple(range(layers)),
    )


def build_mixer_family(
    name: str,
    sizes: Callable[[HFConfig], dict[str, int]],
    arch_config: Callable[[HFConfig], ArchConfig],
    *,
    mixer: Parameters,
    tied_by_default: bool,
) -> Family:
    """Return a family of models with only recurrent mixers.

    Args:
        name: `model_type` of its config.json.
        sizes: Axis name -> extent.
        arch_config: The architecture.
        mixer: Parameters of the mixer of a layer.
        tied_by_default: Whether the head is tied if the config does not say.
    """
    layer = {**rms_norm("attn_norm", "embed <- norm.weight: embed"), **mixer}
    return rows.build_family(
        name=name,
        prefix="backbone.",
        sizes=sizes,
        arch_config=arch_config,
        parameters={
            **embedding("tokens", "vocab embed <- embeddings.weight: vocab embed"),
            **stack("layers", "layers.{layers}", layer),
            **rms_norm("final_norm", "embed <- norm_f.weight: embed"),
            **_llama_style.HEAD,
        },
        tied_by_default=tied_by_default,
        dropped={},
    )
