"""Mamba, Mamba-2, and Nemotron-H: models without rotation, with Mamba's names of tensors. No I/O, no jax."""

from __future__ import annotations

import dataclasses
import math
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
from prepcli.core.json_values import HFConfig, JsonValue
from prepcli.models.architecture import (
    FULL_ATTENTION,
    ROPE_FIELDS,
    ArchConfig,
    read_activation,
    read_positive,
)
from prepcli.models.declaration import (
    ALWAYS,
    Condition,
    LayerGroup,
    Parameters,
    Sizes,
    attention,
    by_name,
    declare,
    embedding,
    linear,
    mark_part,
    matrix,
    plain_mlp,
    stack,
    unless_false,
)
from prepcli.models.families import _llama_style
from prepcli.models.families._llama_style import HEAD, read_experts_per_token, rms_norms
from prepcli.models.families._moe_style import correction, grouped_router, read_experts
from prepcli.models.families.hybrid import (
    FULL,
    HEADS,
    LINEAR,
    QUERIES,
    VALUES,
    convolution,
    layer_choice,
    layers_of,
    read_layer_types,
)
from prepcli.models.layer_config import InitialSteps, Mixer, Router
from prepcli.models.parameters import MAX_LAYERS, Family, Parameter, if_set, read_size

# --- Mamba

# Config fields of the width of queries and keys, the number of taps of the convolution, and the rank of the steps.
MAMBA_FIELDS = ("state_size", "conv_kernel", "time_step_rank")


def mamba(module: str, *, bias: Condition, conv_bias: Condition) -> Parameters:
    """Return the parameters of Mamba. `bias` belongs to the projections of hidden states."""
    fused = f"mixer_channels embed <- {module}.in_proj.weight: (parts={{}} mixer_channels) embed"
    # One tensor has the down projection of steps, the keys and the queries, in this order.
    selections = {"dt_down": "dt_rank", "k": "mixer_state", "q": "mixer_state"}
    parameters: Parameters = {}
    for name, dim in selections.items():
        part = mark_part(selections, name)
        row = f"{dim} mixer_channels <- {module}.x_proj.weight: {part} mixer_channels"
        parameters |= matrix(f"mixer.{name}", row)
    rates = f"mixer_channels mixer_state <- {module}.A_log: mixer_channels mixer_state"
    return {
        **linear("mixer.v", fused.format(0), bias),
        **linear("mixer.z", fused.format(1), bias),
        **convolution("mixer.v_conv", f"{module}.conv1d", "mixer_channels", "mixer_channels", conv_bias),
        **parameters,
        **linear("mixer.dt_up", f"mixer_channels dt_rank <- {module}.dt_proj.weight: mixer_channels dt_rank"),
        "mixer.a_log.weight": Parameter(rates),
        "mixer.d.weight": Parameter(f"mixer_channels <- {module}.D: mixer_channels"),
        **linear("mixer.o", f"embed mixer_channels <- {module}.out_proj.weight: embed mixer_channels", bias),
    }  # fmt: skip


def mamba_sizes(
    config: HFConfig, embed: int, channels: int, fields: Sequence[str]
) -> dict[str, int]:
    """Return the sizes of Mamba, from config fields in the order of MAMBA_FIELDS."""
    state, kernel, rank = fields
    dt_rank = math.ceil(embed / 16)
    if config.get(rank) != "auto":
        dt_rank = read_size(config, rank, dt_rank)
    return {
        "mixer_channels": channels,
        "mixer_state": read_size(config, state, 16),
        "kernel": read_size(config, kernel, 4),
        "dt_rank": dt_rank,
        "parts": 2,
    }


def _read_initial_steps(config: HFConfig) -> InitialSteps:
    """Return the initial steps of Mamba or Mamba-2."""
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


# --- Mamba-2

# Config fields of the number of heads, their width, the number of their groups, the width of queries and keys, and the
# number of taps of the convolution.
MAMBA2_FIELDS = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
NEMOTRON_FIELDS = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
# transformers 5 writes infinity so, which JSON lacks.
INFINITY = {"__float__": "Infinity"}


def mamba2(
    module: str, *, bias: Condition, out_bias: Condition, conv_bias: Condition, norm: Condition = ALWAYS
) -> Parameters:  # fmt: skip
    """Return the parameters of Mamba-2. `bias` belongs to the input projection."""
    # One tensor has gates, values, keys, queries and steps, in this order.
    projections = {"z": VALUES, "v": VALUES, "k": QUERIES, "q": QUERIES, "dt": HEADS}
    channels = {"v": VALUES, "k": QUERIES, "q": QUERIES}
    parameters: Parameters = {}
    for name, dims in projections.items():
        row = f"{dims} embed <- {module}.in_proj.weight: {mark_part(projections, name)} embed"
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


def mamba2_sizes(
    config: HFConfig,
    width: int,
    fields: Sequence[str],
    *,
    head_dim: int | None,
    groups: int,
    state: int,
) -> dict[str, int]:
    """Return the sizes of Mamba-2.

    `width` is that of all heads together. `fields` are in the order of MAMBA2_FIELDS. The other arguments are
    defaults. Without a default of `head_dim`, the heads share `width`.
    """
    heads_field, head_dim_field, groups_field, state_field, kernel_field = fields
    num_heads = read_size(config, heads_field, 128)
    num_groups = read_size(config, groups_field, groups)
    stored_head_dim = config.get(head_dim_field)
    if stored_head_dim == "auto" or (head_dim is None and stored_head_dim is None):
        head_width = width // num_heads
    else:
        head_width = read_size(config, head_dim_field, head_dim or 1)
    if num_heads * head_width != width:
        why = (
            f"{num_heads} heads of {head_width} elements do not make up the expanded width {width}"
        )
        raise invalid_config_error(why)
    if num_heads % num_groups:
        why = f"{groups_field} is {num_groups}, it must divide {heads_field}, which is {num_heads}"
        raise invalid_config_error(why)
    return {
        "mixer_groups": num_groups,
        "group_heads": num_heads // num_groups,
        "mixer_state": read_size(config, state_field, state),
        "mixer_head_dim": head_width,
        "kernel": read_size(config, kernel_field, 4),
    }


def read_mamba2(config: HFConfig) -> Mixer:
    """Return the Mamba-2 mixer of a config. Raise PrepError if `time_step_limit` is not a pair of numbers."""
    stored: Any = config.get("time_step_limit")
    if stored is None:
        return Mixer("mamba2")
    limits: list[Any] = []
    if isinstance(stored, list | tuple):
        limits = [math.inf if limit == INFINITY else limit for limit in stored]
    if len(limits) != 2 or not all(type(limit) in (int, float) for limit in limits):
        raise invalid_config_error(f"time_step_limit is {stored!r:.60}, it must be two numbers")
    return Mixer("mamba2", dt_limits=(float(limits[0]), float(limits[1])))


# --- Models with Mamba's names of tensors, without rotation

MIXER_NORM = rms_norms(attn_norm="norm")
OWN_MAMBA = mamba("mixer", bias=if_set("use_bias"), conv_bias=unless_false("use_conv_bias"))
OWN_MAMBA2 = mamba2(
    "mixer",
    bias=if_set("use_bias"),
    out_bias=if_set("use_bias"),
    conv_bias=unless_false("use_conv_bias"),
)


def _backbone(layer: Parameters) -> Parameters:
    """Return the parameters of a model, from the parameters of a layer."""
    return {
        **embedding("tokens", "vocab embed <- embeddings.weight: vocab embed"),
        **stack(LAYERS, "layers.{layers}", layer),
        **rms_norms(final_norm="norm_f"),
        **HEAD,
    }


def _model_sizes(config: HFConfig, *, vocab: int, embed: int, layers: int) -> dict[str, int]:
    """Return the sizes outside of mixers. The arguments are the defaults."""
    return {
        "vocab": read_size(config, "vocab_size", vocab),
        "layers": read_size(config, "num_hidden_layers", layers, MAX_LAYERS),
        "embed": read_size(config, "hidden_size", embed),
    }


def _read_mamba_sizes(config: HFConfig) -> dict[str, int]:
    sizes = _model_sizes(config, vocab=50280, embed=768, layers=32)
    expanded = sizes["embed"] * read_size(config, "expand", 2)
    channels = read_size(config, "intermediate_size", expanded)
    return {**sizes, **mamba_sizes(config, sizes["embed"], channels, MAMBA_FIELDS)}


def _read_mamba2_sizes(config: HFConfig) -> dict[str, int]:
    sizes = _model_sizes(config, vocab=32768, embed=4096, layers=64)
    width = sizes["embed"] * read_size(config, "expand", 2)
    mixer = mamba2_sizes(config, width, MAMBA2_FIELDS, head_dim=64, groups=8, state=128)
    return {**sizes, **mixer}


def _arch(
    config: HFConfig,
    sizes: Sizes,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    init_std: float = 0.1,
) -> ArchConfig:
    """Return the architecture without its mixers.

    `activation` is a config field and its default. `init_std` is the default of `initializer_range`.
    """
    return ArchConfig(
        norm="rms",
        norm_eps=read_positive(config, "layer_norm_epsilon", 1e-5),
        activation=read_activation(config, *activation),
        has_gated_mlp=False,
        attn_scale=1.0,
        sliding_windows=(FULL_ATTENTION,) * sizes[LAYERS],
        rope=None,
        max_positions=0,
        init_std=read_positive(config, "initializer_range", init_std),
    )


def all_layers(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    """Return the numbers of all layers."""
    return tuple(range(sizes[LAYERS]))


def _reject_rescaled_outputs(config: HFConfig, sizes: Sizes) -> None:
    if config.get("rescale_prenorm_residual"):
        why = "transformers 5 divides stored output projections by sqrt(num_hidden_layers) when it loads them"
        raise unsupported_config_error("rescale_prenorm_residual=true is not supported", why)


# --- Nemotron-H

MLP = "mlp"
MOE = "moe"
NEMOTRON_TYPES = (LINEAR, FULL, MLP, MOE)
NEMOTRON_DEFAULT_TYPES: list[JsonValue] = [LINEAR, MOE, FULL, MLP]
# Layer types by the character in `hybrid_override_pattern`.
PATTERN_TYPES = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
# Fields of a choice that prep does not have -> values without it.
NEUTRAL_VALUES: Mapping[str, tuple[JsonValue, ...]] = {
    "mamba_proj_bias": (None, False),
    "moe_latent_size": (None,),
    "n_shared_experts": (1,),
    "tie_word_embeddings": (None, False),
}
# Names of fields in the first versions of the config class, which override the present ones.
OLD_FIELDS = ("mamba_n_groups", "mamba_d_conv", "mamba_conv_bias", "mamba_dt_min")


def _read_nemotron_types(config: HFConfig, layers: int = 0) -> tuple[str, ...]:
    """Return the type of each layer, from a list or from a text with a character per layer."""
    # The alias overrides.
    listed: JsonValue = config.get("layer_types", config.get("layers_block_type"))
    pattern = config.get("hybrid_override_pattern")
    if listed is None and isinstance(pattern, str):
        listed = [PATTERN_TYPES.get(character, character) for character in pattern]
    count = read_size(config, "num_hidden_layers", len(listed) if isinstance(listed, list) else 1)
    # As in transformers, the default list does not depend on the number.
    if listed is None:
        listed = NEMOTRON_DEFAULT_TYPES
        count = len(NEMOTRON_DEFAULT_TYPES)
    return read_layer_types(listed, count, NEMOTRON_TYPES, lambda layer: LINEAR)


def _read_nemotron_sizes(config: HFConfig) -> dict[str, int]:
    sizes = _llama_style.sizes(config, vocab=131_072, mlp=21504, kv_heads=8, head_dim=128)
    width = read_size(config, "mamba_num_heads", 128) * read_size(config, "mamba_head_dim", 64)
    return {
        **sizes,
        "layers": len(_read_nemotron_types(config)),
        **mamba2_sizes(config, width, NEMOTRON_FIELDS, head_dim=64, groups=8, state=128),
        "mlp": read_size(config, "moe_intermediate_size", 7688),
        "dense_mlp": sizes["mlp"],
        "shared_mlp": read_size(config, "moe_shared_expert_intermediate_size", 7688),
        "experts": read_experts(config, 8),
    }


def _read_nemotron_mixer(config: HFConfig, sizes: Sizes) -> Mixer:
    """Return Mamba-2 with a lower limit of its steps: the smallest step of the initial values."""
    return Mixer(
        "mamba2",
        activation=read_activation(config, "mamba_hidden_act", "silu"),
        dt_limits=(read_positive(config, "time_step_min", 0.001), math.inf),
        initial_steps=_read_initial_steps(config),
    )


def _read_nemotron_experts_per_token(config: HFConfig, sizes: Sizes) -> int:
    per_token = read_experts_per_token(config, sizes["experts"], default=2)
    return per_token if MOE in _read_nemotron_types(config) else 0


def _read_nemotron_router(config: HFConfig, sizes: Sizes) -> Router:
    per_token = read_experts_per_token(config, sizes["experts"], default=2)
    return grouped_router(config, sizes["experts"], per_token, groups=(1, 1), scale=1.0)


def _check_nemotron(config: HFConfig, sizes: Sizes) -> None:
    """Raise PrepError if the config makes a choice that prep does not have."""
    _llama_style.check_kv_heads(sizes)
    for field, neutral in NEUTRAL_VALUES.items():
        value = config.get(field, neutral[0])
        if value not in neutral:
            what = f"`{field}` is not supported for this family"
            raise unsupported_config_error(what, f"config.json has {value!r:.60}")
    # A field that is only refused is not read: `fields_read` must not list it.
    names = {*config}
    for field in OLD_FIELDS:
        if field in names:
            what = f"`{field}` is not supported for this family"
            raise unsupported_config_error(what, "it is an old name of another field")
    if LINEAR not in _read_nemotron_types(config):
        why = "no layer is of the type linear_attention"
        raise unsupported_config_error("models without Mamba-2 are not supported", why)


NEMOTRON_BIAS = if_set("mlp_bias")
# The alternates are the fused tensors of transformers 5.
NEMOTRON_EXPERTS: Parameters = {
    **matrix("mlp.router", "experts embed <- mixer.gate.weight: experts embed"),
    "mlp.router.correction.bias": correction("mixer.gate.e_score_correction_bias: experts"),
    **matrix(
        "mlp.up",
        "experts mlp embed <- mixer.experts.{experts}.up_proj.weight: mlp embed",
        alternate="experts mlp embed <- mixer.experts.up_proj: experts mlp embed",
    ),
    **matrix(
        "mlp.down",
        "experts embed mlp <- mixer.experts.{experts}.down_proj.weight: embed mlp",
        alternate="experts embed mlp <- mixer.experts.down_proj: experts embed mlp",
    ),
    **plain_mlp(
        "mixer.shared_experts.up_proj",
        "mixer.shared_experts.down_proj",
        NEMOTRON_BIAS,
        path="mlp.shared",
        mlp="shared_mlp",
    ),
}


def _nemotron_group(parameters: Parameters, name: str, may_be_all: bool = False) -> LayerGroup:
    return LayerGroup(parameters, layers_of(_read_nemotron_types, name), may_be_all)


def _mixers_only(
    name: str,
    title: str,
    *,
    sizes: Callable[[HFConfig], dict[str, int]],
    parameters: Parameters,
    mixer: Callable[[HFConfig], Mixer],
    tied: bool = False,
) -> Family:
    """Return a family with a norm and a recurrent mixer in each layer, and nothing else."""
    return declare(
        name,
        title,
        sizes=sizes,
        arch=_arch,
        parameters=_backbone(MIXER_NORM | parameters),
        prefix="backbone.",
        choices={
            "mixer": lambda config, sizes: dataclasses.replace(
                mixer(config), initial_steps=_read_initial_steps(config)
            ),
            "mixer_layers": all_layers,
        },
        check=_reject_rescaled_outputs,
        tied=tied,
    )


FAMILIES = by_name(
    _mixers_only(
        "mamba",
        "Mamba: layers of one selective scan each, without attention and MLP.",
        sizes=_read_mamba_sizes,
        parameters=OWN_MAMBA,
        mixer=lambda config: Mixer("mamba"),
        tied=True,
    ),
    _mixers_only(
        "falcon_mamba",
        "Falcon Mamba: Mamba with norms of queries, keys and the ranks of steps, without scales.",
        sizes=_read_mamba_sizes,
        parameters=OWN_MAMBA,
        mixer=lambda config: Mixer(
            "mamba", plain_norm_eps=read_positive(config, "mixer_rms_eps", 1e-6)
        ),
        tied=True,
    ),
    _mixers_only(
        "mamba2",
        "Mamba-2: layers of one recurrent mixer each, without attention and MLP.",
        sizes=_read_mamba2_sizes,
        parameters=OWN_MAMBA2,
        mixer=read_mamba2,
    ),
    declare(
        "nemotron_h",
        "Nemotron-H: layers of one sublayer each (Mamba-2, attention, an MLP or experts), and squared ReLU.",
        sizes=_read_nemotron_sizes,
        arch=partial(_arch, activation=("mlp_hidden_act", "relu2"), init_std=0.02),
        parameters=_backbone(rms_norms(norm="norm")),
        prefix="backbone.",
        groups={
            ATTENTION_LAYERS: _nemotron_group(
                attention("mixer.{}_proj", out_name="o", kv_heads="kv_heads"), FULL
            ),
            MIXER_LAYERS: _nemotron_group(OWN_MAMBA2, LINEAR, may_be_all=True),
            DENSE_LAYERS: _nemotron_group(
                plain_mlp("mixer.up_proj", "mixer.down_proj", NEMOTRON_BIAS, mlp="dense_mlp"), MLP
            ),
            SPARSE_LAYERS: _nemotron_group(NEMOTRON_EXPERTS, MOE),
        },
        choices={
            "attn_scale": lambda config, sizes: sizes["head_dim"] ** -0.5,
            "max_positions": lambda config, sizes: read_size(
                config, "max_position_embeddings", 4096
            ),
            "block_type": "single",
            "mixer": _read_nemotron_mixer,
            "mixer_layers": layer_choice(layers_of(_read_nemotron_types, LINEAR)),
            "feed_forward_layers": layer_choice(layers_of(_read_nemotron_types, MLP, MOE)),
            "dense_layers": layer_choice(layers_of(_read_nemotron_types, MLP)),
            "experts_per_token": _read_nemotron_experts_per_token,
            "router": _read_nemotron_router,
        },
        check=_check_nemotron,
        # Attention does not rotate, whatever the config has.
        ignores=(*ROPE_FIELDS, "partial_rotary_factor"),
    ),
)
