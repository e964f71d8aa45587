"""Mamba and Mamba-2: models of mixers alone, and hybrids with attention, MLPs or experts. No I/O, no jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
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
    reject_unsupported_fields,
)
from prepcli.models.declaration import (
    Choices,
    LayerGroup,
    LayerNumbers,
    Sizes,
    by_name,
    changed,
    declare,
    under_condition,
)
from prepcli.models.families import _llama_style
from prepcli.models.families._deepseek_style import grouped_router, read_experts
from prepcli.models.families._llama_style import (
    BIASED_ATTENTION,
    HEAD,
    PRE_NORMS,
    attention,
    gated_mlp,
    llama_like,
    read_experts_per_token,
    rms_norms,
)
from prepcli.models.families._moe_style import correction
from prepcli.models.families.granitemoe import fused_experts
from prepcli.models.families.hybrid import (
    FULL,
    HEADS,
    LINEAR,
    QUERIES,
    VALUES,
    convolution,
    feed_forward_experts,
    layers_of,
    mark_part,
    mixer_choices,
    mixer_groups,
    other_layers,
    read_layer_types,
)
from prepcli.models.mixer_config import InitialSteps, Mixer
from prepcli.models.moe_config import Router
from prepcli.models.parameters import MAX_LAYERS, Parameter, if_set, read_count, read_size
from prepcli.models.rope_config import Rope, read_rope
from prepcli.models.rows import (
    ALWAYS,
    Condition,
    Parameters,
    embedding,
    linear,
    matrix,
    rms_norm,
    stack,
    unless_false,
)
from prepcli.models.rows import attention as named_attention

# --- Mamba

# Config fields of the width of queries and keys, of the taps of the convolution, and of the rank of the steps.
MAMBA_FIELDS = ("state_size", "conv_kernel", "time_step_rank")
JAMBA_FIELDS = ("mamba_d_state", "mamba_d_conv", "mamba_dt_rank")


def _mamba(module: str, *, bias: Condition, conv_bias: Condition) -> Parameters:
    """Return the parameters of Mamba. `bias` is that of the projections of hidden states."""
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


def _mamba_sizes(
    config: HFConfig, embed: int, channels: int, fields: tuple[str, str, str]
) -> dict[str, int]:
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


# --- Mamba-2

# Config fields of the number and the width of heads, of the number of groups of heads, of the width of queries and keys,
# and of the taps of the convolution.
MAMBA2_FIELDS = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
NEMOTRON_FIELDS = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
BAMBA_FIELDS = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
# transformers 5 writes infinity so, which JSON lacks.
INFINITY = {"__float__": "Infinity"}


def _mamba2(
    module: str, *, bias: Condition, out_bias: Condition, conv_bias: Condition, norm: Condition = ALWAYS
) -> Parameters:  # fmt: skip
    """Return the parameters of Mamba-2. `bias` is that of the input projection."""
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


def _mamba2_sizes(
    config: HFConfig,
    width: int,
    fields: tuple[str, str, str, str, str],
    *,
    head_dim: int | None,
    groups: int,
    state: int,
) -> dict[str, int]:
    """Return the sizes of Mamba-2.

    Args:
        config: Content of a config.json.
        width: Width of all heads together: the width of the layers times the expansion.
        fields: Config fields, as in MAMBA2_FIELDS.
        head_dim: Default of the width of a head, like the following sizes. None means that the heads share `width`.
        groups: Number of groups of heads.
        state: Width of queries and keys.

    Raises:
        PrepError: A size is invalid, or the sizes do not agree.
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


def _read_mamba2(config: HFConfig) -> Mixer:
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
OWN_MAMBA2 = _mamba2(
    "mixer",
    bias=if_set("use_bias"),
    out_bias=if_set("use_bias"),
    conv_bias=unless_false("use_conv_bias"),
)


def _backbone(layer: Parameters) -> Parameters:
    """Return the parameters of a model, from those of a layer."""
    return {
        **embedding("tokens", "vocab embed <- embeddings.weight: vocab embed"),
        **stack(LAYERS, "layers.{layers}", layer),
        **rms_norms(final_norm="norm_f"),
        **HEAD,
    }


def _model_sizes(config: HFConfig, *, vocab: int, embed: int, layers: int) -> dict[str, int]:
    """Return the sizes without those of mixers, by their defaults."""
    return {
        "vocab": read_size(config, "vocab_size", vocab),
        "layers": read_size(config, "num_hidden_layers", layers, MAX_LAYERS),
        "embed": read_size(config, "hidden_size", embed),
    }


def _read_mamba_sizes(config: HFConfig) -> dict[str, int]:
    sizes = _model_sizes(config, vocab=50280, embed=768, layers=32)
    expanded = sizes["embed"] * read_size(config, "expand", 2)
    channels = read_size(config, "intermediate_size", expanded)
    return {**sizes, **_mamba_sizes(config, sizes["embed"], channels, MAMBA_FIELDS)}


def _read_mamba2_sizes(config: HFConfig) -> dict[str, int]:
    sizes = _model_sizes(config, vocab=32768, embed=4096, layers=64)
    width = sizes["embed"] * read_size(config, "expand", 2)
    mixer = _mamba2_sizes(config, width, MAMBA2_FIELDS, head_dim=64, groups=8, state=128)
    return {**sizes, **mixer}


def _arch(
    config: HFConfig,
    sizes: Sizes,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    init_std: float = 0.1,
) -> ArchConfig:
    """Return the architecture without its mixers, with the config field of the activation and its default."""
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


def _all_layers(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
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
        **_mamba2_sizes(config, width, NEMOTRON_FIELDS, head_dim=64, groups=8, state=128),
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
    for field in OLD_FIELDS:
        if field in config:
            what = f"`{field}` is not supported for this family"
            raise unsupported_config_error(what, "it is an old name of another field")
    if LINEAR not in _read_nemotron_types(config):
        why = "no layer is of the type linear_attention"
        raise unsupported_config_error("models without Mamba-2 are not supported", why)


def _plain_mlp(path: str, module: str, mlp: str) -> Parameters:
    """Return the parameters of an MLP without a gate, by the atom of its hidden units."""
    bias = if_set("mlp_bias")
    return {
        **linear(f"{path}.up", f"{mlp} embed <- {module}.up_proj.weight: {mlp} embed", bias),
        **linear(f"{path}.down", f"embed {mlp} <- {module}.down_proj.weight: embed {mlp}", bias),
    }


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
    **_plain_mlp("mlp.shared", "mixer.shared_experts", "shared_mlp"),
}


def _nemotron_group(parameters: Parameters, name: str, may_be_all: bool = False) -> LayerGroup:
    return LayerGroup(parameters, layers_of(_read_nemotron_types, name), may_be_all)


def _nemotron_layers(*names: str) -> Any:
    """Return the choice of the numbers of the layers of some types."""
    numbers = layers_of(_read_nemotron_types, *names)
    return lambda config, sizes: numbers(config, sizes[LAYERS])


# --- Bamba

NORMS = rms_norms(attn_norm="input_layernorm", mlp_norm="pre_ff_layernorm")
FEED_FORWARD = gated_mlp(if_set("mlp_bias"), module="feed_forward")
FINAL_NORM = rms_norms(final_norm="final_layernorm")
BAMBA_SIZES = {"vocab": 128_000, "mlp": 14336, "kv_heads": 8}
BAMBA_POSITIONS = 262_144
# BambaConfig sets it, whatever config.json has.
BAMBA_ROTARY_SHARE = 0.5
BAMBA_MIXER = _mamba2(
    "mamba",
    bias=if_set("mamba_proj_bias"),
    out_bias=if_set("mamba_proj_bias"),
    conv_bias=unless_false("mamba_conv_bias"),
)


def _bamba_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    width = sizes["embed"] * read_size(config, "mamba_expand", 2)
    return _mamba2_sizes(config, width, BAMBA_FIELDS, head_dim=None, groups=1, state=256)


def _read_bamba_rope(config: HFConfig, sizes: Sizes) -> Rope:
    return _llama_style.read_partial_rope(
        changed(config, partial_rotary_factor=BAMBA_ROTARY_SHARE),
        sizes["head_dim"],
        default_share=BAMBA_ROTARY_SHARE,
        max_positions=BAMBA_POSITIONS,
    )


def _listed_attention(config: HFConfig, layers: int) -> tuple[int, ...]:
    listed = config.get("attn_layer_indices") or []
    if not isinstance(listed, list):
        why = f"attn_layer_indices is {listed!r:.60}, it must be a list of layers"
        raise invalid_config_error(why)
    return tuple(layer for layer in range(layers) if layer in listed)


BAMBA_LAYERS = other_layers(_listed_attention)

# --- Granite 4

# Without `attention_multiplier` the scores are not scaled. In other families they are.
GRANITE_FACTORS: Choices = {
    "attn_scale": lambda config, sizes: read_positive(config, "attention_multiplier", 1.0),
    "embed_scale": lambda config, sizes: read_positive(config, "embedding_multiplier", 1.0),
    "residual_scale": lambda config, sizes: read_positive(config, "residual_multiplier", 1.0),
    # The logits are divided by `logits_scaling`.
    "lm_head_input_scale": lambda config, sizes: 1 / read_positive(config, "logits_scaling", 1.0),
}


def _read_num_experts(config: HFConfig) -> int:
    """Return the number of experts of Granite 4, or 0 if the MLPs are dense."""
    return read_count(config, "num_local_experts", 8)


def _has_experts(config: HFConfig) -> bool:
    return _read_num_experts(config) > 0


def _granite_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    shared_mlp = read_size(config, "shared_intermediate_size", 1024)
    return {
        **_bamba_sizes(config, sizes),
        "mlp": sizes["mlp"] if _has_experts(config) else shared_mlp,
        "shared_mlp": shared_mlp,
        "experts": max(1, _read_num_experts(config)),
        "gate_up": 2,
    }


def _read_granite_types(config: HFConfig, layers: int) -> tuple[str, ...]:
    """Return the type of each layer. By default all layers have Mamba-2."""
    # The alias overrides.
    listed = config.get("layers_block_type", config.get("layer_types"))
    return read_layer_types(listed, layers, (FULL, LINEAR), lambda layer: LINEAR)


GRANITE_LAYERS = layers_of(_read_granite_types, LINEAR)


def _read_granite_rope(config: HFConfig, sizes: Sizes) -> Rope | None:
    if config.get("position_embedding_type") != "rope":
        if not GRANITE_LAYERS(config, sizes[LAYERS]):
            what = "layers without Mamba-2 and without rotation are not supported"
            why = "all layers have full_attention, and position_embedding_type is not rope"
            raise unsupported_config_error(what, why)
        return None
    positions = read_size(config, "max_position_embeddings", 2048)
    return read_rope(config, sizes["head_dim"], max_positions=positions)


def _shared_mlp(path: str, mlp: str) -> Parameters:
    """Return the parameters of the MLP of every layer, by the atom of its hidden units."""
    gate_up = f"{mlp} embed <- shared_mlp.input_linear.weight: (gate_up={{}} {mlp}) embed"
    return {
        **matrix(f"{path}.gate", gate_up.format(0)),
        **matrix(f"{path}.up", gate_up.format(1)),
        **matrix(f"{path}.down", f"embed {mlp} <- shared_mlp.output_linear.weight: embed {mlp}"),
    }


def _granite_mlp() -> Parameters:
    """Return the parameters of the experts with the shared MLP, or of the shared MLP alone."""
    shared = _shared_mlp("mlp.shared", "shared_mlp")
    parameters = under_condition({**fused_experts(), **shared}, _has_experts)
    # The gate of the experts and the gate of the dense MLP have one path, so one is the other's `else_row`.
    for path, dense in _shared_mlp("mlp", "mlp").items():
        parameters[path] = dataclasses.replace(parameters[path], else_row=dense.row)
    return parameters


def _read_granite_experts_per_token(config: HFConfig, sizes: Sizes) -> int:
    return read_experts_per_token(config, sizes["experts"], 2) if _has_experts(config) else 0


# --- Falcon-H1

# The projections in the order of `ssm_multipliers`. Their values, keys and queries are x, B and C there.
MIXER_PROJECTIONS = ("z", "v", "k", "q", "dt")


def _falcon_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    expanded = sizes["embed"] * read_size(config, "mamba_expand", 2)
    # A null, unlike an absent field, means the expanded width.
    default = expanded if "mamba_d_ssm" in config else 1024
    width = read_size(config, "mamba_d_ssm", default)
    return _mamba2_sizes(config, width, BAMBA_FIELDS, head_dim=None, groups=1, state=256)


def _read_falcon_mixer(config: HFConfig, sizes: Sizes) -> Mixer:
    """Return Mamba-2 with its factors. Its norm is optional."""
    norm_place = "before_gate" if config.get("mamba_norm_before_gate", True) else "after_gate"
    if not config.get("mamba_rms_norm"):
        norm_place = "none"
    factors = _read_factors(config, "ssm_multipliers", count=len(MIXER_PROJECTIONS))
    return dataclasses.replace(
        _read_mamba2(config),
        norm_place=norm_place,
        input_scale=read_positive(config, "ssm_in_multiplier", 1.0),
        projection_scales=tuple(zip(MIXER_PROJECTIONS, factors)),
        output_scale=read_positive(config, "ssm_out_multiplier", 1.0),
    )


def _read_factors(config: HFConfig, key: str, *, count: int) -> list[float]:
    """Return the factors in a config field, or ones if it is absent or null.

    Raises:
        PrepError: The value is not a list of `count` numbers above 0.
    """
    listed: Any = config.get(key)
    if listed is None:
        return [1.0] * count
    if not isinstance(listed, list) or len(listed) != count:
        raise invalid_config_error(f"{key} is {listed!r:.60}, it must be {count} numbers")
    return [read_positive({key: factor}, key, 1.0) for factor in listed]


def _factor(field: str) -> Any:
    """Return the reader of a factor."""
    return lambda config, sizes: read_positive(config, field, 1.0)


# --- Jamba


def _jamba_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    channels = sizes["embed"] * read_size(config, "mamba_expand", 2)
    return {
        **_mamba_sizes(config, sizes["embed"], channels, JAMBA_FIELDS),
        "experts": _read_jamba_experts(config),
        "gate_up": 2,
    }


def _read_jamba_experts(config: HFConfig) -> int:
    """Return the number of experts, 1 if all MLPs are dense. `num_local_experts` takes precedence."""
    return read_size(config, "num_local_experts", read_size(config, "num_experts", 16))


def _every(field: str, *, period: int, offset: int) -> LayerNumbers:
    """Return the function to the numbers of the layers at an offset in each period, by the defaults of both."""

    def numbers(config: HFConfig, layers: int) -> tuple[int, ...]:
        length = read_size(config, f"{field}_period", period)
        first = config.get(f"{field}_offset", offset)
        if type(first) is not int or not 0 <= first < length:
            why = f"{field}_offset is {first!r:.60}, it must be an integer from 0 to {length - 1}"
            raise invalid_config_error(why)
        return tuple(range(layers))[first::length]

    return numbers


JAMBA_ATTENTION = _every("attn_layer", period=8, offset=4)
JAMBA_MIXERS = other_layers(JAMBA_ATTENTION)


def _jamba_sparse(config: HFConfig, layers: int) -> tuple[int, ...]:
    listed = _every("expert_layer", period=2, offset=1)(config, layers)
    return () if _read_jamba_experts(config) == 1 else listed


JAMBA_DENSE = other_layers(_jamba_sparse)


def _check_jamba(config: HFConfig, sizes: Sizes) -> None:
    # Its attention does not rotate.
    reject_unsupported_fields({field: config.get(field) for field in ROPE_FIELDS})
    if not JAMBA_DENSE(config, sizes[LAYERS]):
        what = "models without a dense MLP are not supported"
        raise unsupported_config_error(what, "all layers have experts")
    if not JAMBA_MIXERS(config, sizes[LAYERS]):
        what = "models without Mamba are not supported"
        raise unsupported_config_error(what, "all layers have attention")


def _read_jamba_experts_per_token(config: HFConfig, sizes: Sizes) -> int:
    if not _jamba_sparse(config, sizes[LAYERS]):
        return 0
    return read_experts_per_token(config, sizes["experts"], default=2)


def _read_jamba_dense(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    has_experts = _jamba_sparse(config, sizes[LAYERS])
    return JAMBA_DENSE(config, sizes[LAYERS]) if has_experts else ()


JAMBA_MIXER: Parameters = {
    **_mamba("mamba", bias=if_set("mamba_proj_bias"), conv_bias=unless_false("mamba_conv_bias")),
    **rms_norm("mixer.q_norm", "mixer_state <- mamba.c_layernorm.weight: mixer_state"),
    **rms_norm("mixer.k_norm", "mixer_state <- mamba.b_layernorm.weight: mixer_state"),
    **rms_norm("mixer.dt_down_norm", "dt_rank <- mamba.dt_layernorm.weight: dt_rank"),
}
JAMBA_EXPERTS: Parameters = {
    **matrix("mlp.router", "experts embed <- feed_forward.router.weight: experts embed"),
    **feed_forward_experts("gate_proj", "up_proj", "down_proj"),
}

FAMILIES = by_name(
    declare(
        "mamba",
        "Mamba: layers of one selective scan each, without attention and MLP.",
        sizes=_read_mamba_sizes,
        arch=_arch,
        parameters=_backbone(
            {
                **MIXER_NORM,
                **_mamba("mixer", bias=if_set("use_bias"), conv_bias=unless_false("use_conv_bias")),
            }
        ),
        prefix="backbone.",
        choices={
            "mixer": lambda config, sizes: Mixer(
                "mamba", initial_steps=_read_initial_steps(config)
            ),
            "mixer_layers": _all_layers,
        },
        check=_reject_rescaled_outputs,
        tied=True,
    ),
    declare(
        "mamba2",
        "Mamba-2: layers of one recurrent mixer each, without attention and MLP.",
        sizes=_read_mamba2_sizes,
        arch=_arch,
        parameters=_backbone({**MIXER_NORM, **OWN_MAMBA2}),
        prefix="backbone.",
        choices={
            "mixer": lambda config, sizes: dataclasses.replace(
                _read_mamba2(config), initial_steps=_read_initial_steps(config)
            ),
            "mixer_layers": _all_layers,
        },
        check=_reject_rescaled_outputs,
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
                named_attention("mixer.{}_proj", out_name="o", kv_heads="kv_heads"), FULL
            ),
            MIXER_LAYERS: _nemotron_group(OWN_MAMBA2, LINEAR, may_be_all=True),
            DENSE_LAYERS: _nemotron_group(_plain_mlp("mlp", "mixer", "dense_mlp"), MLP),
            SPARSE_LAYERS: _nemotron_group(NEMOTRON_EXPERTS, MOE),
        },
        choices={
            "attn_scale": lambda config, sizes: sizes["head_dim"] ** -0.5,
            "max_positions": lambda config, sizes: read_size(
                config, "max_position_embeddings", 4096
            ),
            "block_type": "single",
            "mixer": _read_nemotron_mixer,
            "mixer_layers": _nemotron_layers(LINEAR),
            "feed_forward_layers": _nemotron_layers(MLP, MOE),
            "dense_layers": _nemotron_layers(MLP),
            "experts_per_token": lambda config, sizes: (
                read_experts_per_token(config, sizes["experts"], default=2)
                if MOE in _read_nemotron_types(config)
                else 0
            ),
            "router": _read_nemotron_router,
        },
        check=_check_nemotron,
        # Attention does not rotate, whatever the config has.
        ignores=(*ROPE_FIELDS, "partial_rotary_factor"),
    ),
    llama_like(
        "bamba",
        "Bamba: Mamba-2 in most layers, attention in some, and an MLP in each.",
        layer={**NORMS, **FEED_FORWARD},
        groups=mixer_groups(BIASED_ATTENTION, BAMBA_MIXER, BAMBA_LAYERS),
        final_norm=FINAL_NORM,
        defaults=BAMBA_SIZES,
        more_sizes=_bamba_sizes,
        positions=BAMBA_POSITIONS,
        rope=_read_bamba_rope,
        norm_eps=1e-5,
        choices=mixer_choices(_read_mamba2, BAMBA_LAYERS),
    ),
    llama_like(
        "granitemoehybrid",
        "Granite 4: Mamba-2 in most layers, attention in some, experts in all layers or in none, and Granite's factors.",
        layer={**PRE_NORMS, **_granite_mlp()},
        groups=mixer_groups(BIASED_ATTENTION, BAMBA_MIXER, GRANITE_LAYERS),
        more_sizes=_granite_sizes,
        choices={
            **GRANITE_FACTORS,
            **mixer_choices(_read_mamba2, GRANITE_LAYERS),
            "rope": _read_granite_rope,
            "experts_per_token": _read_granite_experts_per_token,
        },
    ),
    llama_like(
        "falcon_h1",
        "Falcon-H1: attention and Mamba-2 side by side in each layer, with a factor for most projections.",
        layer={
            **NORMS,
            **BIASED_ATTENTION,
            **_mamba2(
                "mamba",
                bias=if_set("mamba_proj_bias"),
                out_bias=if_set("projectors_bias"),
                conv_bias=unless_false("mamba_conv_bias"),
                norm=if_set("mamba_rms_norm"),
            ),
            **FEED_FORWARD,
        },
        final_norm=FINAL_NORM,
        defaults=BAMBA_SIZES,
        more_sizes=_falcon_sizes,
        positions=8192,
        norm_eps=1e-5,
        choices={
            "embed_scale": _factor("embedding_multiplier"),
            "lm_head_input_scale": _factor("lm_head_multiplier"),
            # Scores are linear in the keys.
            "attn_scale": lambda config, sizes: (
                sizes["head_dim"] ** -0.5 * read_positive(config, "key_multiplier", 1.0)
            ),
            "attn_input_scale": _factor("attention_in_multiplier"),
            "attn_output_scale": _factor("attention_out_multiplier"),
            "gate_scale": lambda config, sizes: _read_factors(config, "mlp_multipliers", count=2)[
                0
            ],
            "mlp_output_scale": lambda config, sizes: _read_factors(
                config, "mlp_multipliers", count=2
            )[1],
            "mixer": _read_falcon_mixer,
            "mixer_layers": _all_layers,
            "has_attention_beside_mixer": True,
        },
    ),
    llama_like(
        "jamba",
        "Jamba: Mamba in most layers, attention without rotation in some, and experts in every second layer.",
        layer=NORMS,
        groups={
            ATTENTION_LAYERS: LayerGroup(attention(), JAMBA_ATTENTION, may_be_all=False),
            MIXER_LAYERS: LayerGroup(JAMBA_MIXER, JAMBA_MIXERS),
            DENSE_LAYERS: LayerGroup(gated_mlp(module="feed_forward"), JAMBA_DENSE),
            SPARSE_LAYERS: LayerGroup(JAMBA_EXPERTS, _jamba_sparse, may_be_all=False),
        },
        final_norm=FINAL_NORM,
        defaults={**BAMBA_SIZES, "vocab": 65536},
        more_sizes=_jamba_sizes,
        positions=262_144,
        choices={
            "rope": None,
            "mixer": Mixer("mamba"),
            "mixer_layers": lambda config, sizes: JAMBA_MIXERS(config, sizes[LAYERS]),
            "experts_per_token": _read_jamba_experts_per_token,
            "router": Router(is_normalized=False),
            "dense_layers": _read_jamba_dense,
        },
        check=_check_jamba,
    ),
)
