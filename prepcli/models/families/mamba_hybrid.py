"""Hybrid models of attention and Mamba or Mamba-2: Bamba, Granite 4, Falcon-H1 and Jamba. No I/O, no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
from prepcli.models.architecture import ROPE_FIELDS, read_positive, reject_unsupported_fields
from prepcli.models.declaration import (
    LayerGroup,
    LayerNumbers,
    Parameters,
    Sizes,
    by_name,
    changed,
    matrix,
    positive,
    rms_norm,
    under_condition,
    unless_false,
)
from prepcli.models.families._llama_style import (
    BIASED_ATTENTION,
    PRE_NORMS,
    attention,
    gated_mlp,
    llama_like,
    partial_rope,
    read_experts_per_token,
    rms_norms,
)
from prepcli.models.families._moe_style import fused_experts, granite_shared_mlp
from prepcli.models.families.hybrid import (
    FULL,
    LINEAR,
    feed_forward_experts,
    layer_choice,
    layers_of,
    mixer_choices,
    mixer_groups,
    other_layers,
    read_layer_types,
)
from prepcli.models.families.llama_extended import GRANITE_FACTORS
from prepcli.models.families.mamba import (
    all_layers,
    mamba,
    mamba2,
    mamba2_sizes,
    mamba_sizes,
    read_mamba2,
)
from prepcli.models.layer_config import Mixer, Router
from prepcli.models.parameters import if_set, read_count, read_size
from prepcli.models.rope_config import Rope, read_rope

# --- Bamba, and parts that it shares with Granite 4, Falcon-H1 and Jamba

# As in `mamba.MAMBA2_FIELDS`.
MAMBA2_FIELDS = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
NORMS = rms_norms(attn_norm="input_layernorm", mlp_norm="pre_ff_layernorm")
FEED_FORWARD = gated_mlp(if_set("mlp_bias"), module="feed_forward")
FINAL_NORM = rms_norms(final_norm="final_layernorm")
BAMBA_SIZES = {"vocab": 128_000, "mlp": 14336, "kv_heads": 8}
BAMBA_POSITIONS = 262_144
# BambaConfig sets it, whatever config.json has.
BAMBA_ROTARY_SHARE = 0.5
BAMBA_MIXER = mamba2(
    "mamba",
    bias=if_set("mamba_proj_bias"),
    out_bias=if_set("mamba_proj_bias"),
    conv_bias=unless_false("mamba_conv_bias"),
)


def _bamba_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    width = sizes["embed"] * read_size(config, "mamba_expand", 2)
    return mamba2_sizes(config, width, MAMBA2_FIELDS, head_dim=None, groups=1, state=256)


def _read_bamba_rope(config: HFConfig, sizes: Sizes) -> Rope:
    config = changed(config, partial_rotary_factor=BAMBA_ROTARY_SHARE)
    return partial_rope(BAMBA_ROTARY_SHARE, BAMBA_POSITIONS)(config, sizes)


def _listed_attention(config: HFConfig, layers: int) -> tuple[int, ...]:
    listed = config.get("attn_layer_indices") or []
    if not isinstance(listed, list):
        why = f"attn_layer_indices is {listed!r:.60}, it must be a list of layers"
        raise invalid_config_error(why)
    return tuple(layer for layer in range(layers) if layer in listed)


BAMBA_LAYERS = other_layers(_listed_attention)

# --- Granite 4


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
        return None
    positions = read_size(config, "max_position_embeddings", 2048)
    return read_rope(config, sizes["head_dim"], max_positions=positions)


def _check_granite(config: HFConfig, sizes: Sizes) -> None:
    has_mixers = bool(GRANITE_LAYERS(config, sizes[LAYERS]))
    if not has_mixers and config.get("position_embedding_type") != "rope":
        what = "layers without Mamba-2 and without rotation are not supported"
        why = "all layers have full_attention, and position_embedding_type is not rope"
        raise unsupported_config_error(what, why)


def _granite_mlp() -> Parameters:
    """Return the parameters of the experts with the shared MLP, or of the shared MLP alone."""
    shared = granite_shared_mlp("mlp.shared", "shared_mlp")
    parameters = under_condition({**fused_experts(), **shared}, _has_experts)
    # The gate of the experts and the gate of the dense MLP have one path, so one is the other's `else_row`.
    for path, dense in granite_shared_mlp("mlp", "mlp").items():
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
    return mamba2_sizes(config, width, MAMBA2_FIELDS, head_dim=None, groups=1, state=256)


def _read_falcon_mixer(config: HFConfig, sizes: Sizes) -> Mixer:
    """Return Mamba-2 with its factors. Its norm is optional."""
    norm_place = "before_gate" if config.get("mamba_norm_before_gate", True) else "after_gate"
    if not config.get("mamba_rms_norm"):
        norm_place = "none"
    factors = _read_factors(config, "ssm_multipliers", len(MIXER_PROJECTIONS))
    return dataclasses.replace(
        read_mamba2(config),
        norm_place=norm_place,
        input_scale=read_positive(config, "ssm_in_multiplier", 1.0),
        projection_scales=tuple(zip(MIXER_PROJECTIONS, factors)),
        output_scale=read_positive(config, "ssm_out_multiplier", 1.0),
    )


def _read_factors(config: HFConfig, key: str, count: int) -> list[float]:
    """Return the factors in a config field, or ones if it is absent or null."""
    listed: Any = config.get(key)
    if listed is None:
        return [1.0] * count
    if not isinstance(listed, list) or len(listed) != count:
        raise invalid_config_error(f"{key} is {listed!r:.60}, it must be {count} numbers")
    return [read_positive({key: factor}, key, 1.0) for factor in listed]


def _mlp_factor(number: int) -> Callable[[HFConfig, Sizes], float]:
    """Return the reader of a factor of the MLP: of its gate (0) or of its output (1)."""
    return lambda config, sizes: _read_factors(config, "mlp_multipliers", 2)[number]


# --- Jamba

# As in `mamba.MAMBA_FIELDS`.
MAMBA_FIELDS = ("mamba_d_state", "mamba_d_conv", "mamba_dt_rank")


def _jamba_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    channels = sizes["embed"] * read_size(config, "mamba_expand", 2)
    return {
        **mamba_sizes(config, sizes["embed"], channels, MAMBA_FIELDS),
        "experts": _read_jamba_experts(config),
        "gate_up": 2,
    }


def _read_jamba_experts(config: HFConfig) -> int:
    """Return the number of experts, 1 if all MLPs are dense. `num_local_experts` takes precedence."""
    return read_size(config, "num_local_experts", read_size(config, "num_experts", 16))


def _every(field: str, *, period: int, offset: int) -> LayerNumbers:
    """Return the reader of the layers at an offset in each period. The arguments are the defaults."""

    def read(config: HFConfig, layers: int) -> tuple[int, ...]:
        length = read_size(config, f"{field}_period", period)
        first = config.get(f"{field}_offset", offset)
        if type(first) is not int or not 0 <= first < length:
            why = f"{field}_offset is {first!r:.60}, it must be an integer from 0 to {length - 1}"
            raise invalid_config_error(why)
        return tuple(range(layers))[first::length]

    return read


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
    has_experts = _jamba_sparse(config, sizes[LAYERS])
    return read_experts_per_token(config, sizes["experts"], default=2) if has_experts else 0


def _read_jamba_dense(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    has_experts = _jamba_sparse(config, sizes[LAYERS])
    return JAMBA_DENSE(config, sizes[LAYERS]) if has_experts else ()


JAMBA_MIXER: Parameters = {
    **mamba("mamba", bias=if_set("mamba_proj_bias"), conv_bias=unless_false("mamba_conv_bias")),
    **rms_norm("mixer.q_norm", "mixer_state <- mamba.c_layernorm.weight: mixer_state"),
    **rms_norm("mixer.k_norm", "mixer_state <- mamba.b_layernorm.weight: mixer_state"),
    **rms_norm("mixer.dt_down_norm", "dt_rank <- mamba.dt_layernorm.weight: dt_rank"),
}
JAMBA_EXPERTS: Parameters = {
    **matrix("mlp.router", "experts embed <- feed_forward.router.weight: experts embed"),
    **feed_forward_experts("gate_proj", "up_proj", "down_proj"),
}

FAMILIES = by_name(
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
        choices=mixer_choices(read_mamba2, BAMBA_LAYERS),
    ),
    llama_like(
        "granitemoehybrid",
        "Granite 4: Mamba-2 in most layers, attention in some, experts in all layers or in none, Granite's factors.",
        layer={**PRE_NORMS, **_granite_mlp()},
        groups=mixer_groups(BIASED_ATTENTION, BAMBA_MIXER, GRANITE_LAYERS),
        more_sizes=_granite_sizes,
        choices={
            **GRANITE_FACTORS,
            **mixer_choices(read_mamba2, GRANITE_LAYERS),
            "rope": _read_granite_rope,
            "experts_per_token": _read_granite_experts_per_token,
        },
        check=_check_granite,
    ),
    llama_like(
        "falcon_h1",
        "Falcon-H1: attention and Mamba-2 side by side in each layer, with a factor for most projections.",
        layer={
            **NORMS,
            **BIASED_ATTENTION,
            **mamba2(
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
            "embed_scale": positive("embedding_multiplier", 1.0),
            "lm_head_input_scale": positive("lm_head_multiplier", 1.0),
            # Scores are linear in the keys.
            "attn_scale": lambda config, sizes: (
                sizes["head_dim"] ** -0.5 * read_positive(config, "key_multiplier", 1.0)
            ),
            "attn_input_scale": positive("attention_in_multiplier", 1.0),
            "attn_output_scale": positive("attention_out_multiplier", 1.0),
            "gate_scale": _mlp_factor(0),
            "mlp_output_scale": _mlp_factor(1),
            "mixer": _read_falcon_mixer,
            "mixer_layers": all_layers,
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
            "mixer_layers": layer_choice(JAMBA_MIXERS),
            "experts_per_token": _read_jamba_experts_per_token,
            "router": Router(is_normalized=False),
            "dense_layers": _read_jamba_dense,
        },
        check=_check_jamba,
    ),
)  # fmt: skip
