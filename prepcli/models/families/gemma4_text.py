"""Gemma 4 (text model): Gemma 3 with wider heads in full attention, inputs of layers, and keys of earlier layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from prepcli.algebra.axis_map import (
    FULL_LAYERS,
    LAYERS,
    NARROW_LAYERS,
    REUSING_FULL_LAYERS,
    REUSING_SLIDING_LAYERS,
    SLIDING_LAYERS,
    WIDE_LAYERS,
)
from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.core.formatting import parse_decimal
from prepcli.core.json_values import JsonObject
from prepcli.models.architecture import (
    FULL_ATTENTION,
    LAYER_TYPES,
    ArchConfig,
    read_sliding_windows,
    read_softcap,
    reject_unsupported_fields,
)
from prepcli.models.families import _gemma_style, _grouped_style, _llama_style
from prepcli.models.families._grouped_style import LayerGroup
from prepcli.models.moe_config import Router
from prepcli.models.parameters import MAX_LAYERS, HFConfig, Parameter, if_set, read_size
from prepcli.models.rope_config import Rope, read_proportional_rope, read_rope
from prepcli.models.rows import Parameters, matrix

FULL_TYPE = LAYER_TYPES[0]
SLIDING_TYPE = LAYER_TYPES[1]
MAX_POSITIONS = 131072
# Every sixth layer has full attention.
PATTERN = 6
HEAD_FIELDS = ("head_dim", "num_key_value_heads")
ROPE_PARAMETERS: JsonObject = {
    FULL_TYPE: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING_TYPE: {"rope_type": "default", "rope_theta": 1e4},
}


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Gemma4TextConfig."""
    axis_sizes = _llama_style.sizes(
        config, vocab=262144, embed=2304, mlp=9216, layers=30, heads=8, kv_heads=4, head_dim=256
    )
    full_heads = _full_heads(config, axis_sizes)
    axis_sizes |= {
        "full_head_dim": read_size(full_heads, "head_dim", axis_sizes["head_dim"]),
        "full_kv_heads": read_size(full_heads, "num_key_value_heads", axis_sizes["kv_heads"]),
        "wide_mlp": 2 * axis_sizes["mlp"],
    }
    if has_experts(config):
        axis_sizes |= {
            "experts": _read_count(config, "num_experts"),
            "expert_mlp": _read_count(config, "moe_intermediate_size"),
            "gate_up": 2,
        }
    if has_layer_inputs(config):
        axis_sizes |= _gemma_style.layer_input_sizes(config, axis_sizes[LAYERS])
    return axis_sizes


def has_experts(config: HFConfig) -> bool:
    """Return whether each layer has experts and an MLP."""
    return bool(config.get("enable_moe_block"))


def _read_count(config: HFConfig, field: str) -> int:
    """Return a size that a model with experts has to state."""
    if config.get(field) is None:
        raise invalid_config_error(f"enable_moe_block is set, but there is no {field}")
    return read_size(config, field, 1)


def _full_heads(config: HFConfig, axis_sizes: Mapping[str, int]) -> HFConfig:
    """Return the fields of the heads of layers with full attention.

    Transformers 5 writes `per_layer_config`, e.g. {"05": {"head_dim": 512}}. Published configs have other fields.

    Raises:
        PrepError: The heads of these layers differ, or layers with a sliding window have other heads.
    """
    if "per_layer_config" not in config:
        heads: dict[str, Any] = {"head_dim": read_size(config, "global_head_dim", 512)}
        if config.get("attention_k_eq_v"):
            heads["num_key_value_heads"] = config.get("num_global_key_value_heads")
        return heads
    stored: Any = config["per_layer_config"] or {}
    if not isinstance(stored, dict):
        raise invalid_config_error(f"per_layer_config is {stored!r:.60}, it must be an object")
    sections = {parse_decimal(number): section for number, section in stored.items()}
    full = [layer for layer, window in enumerate(_windows(config)) if window == FULL_ATTENTION]
    first = sections.get(full[0], {})
    is_uniform = all(sections.get(layer, {}) == first for layer in full)
    if (
        not is_uniform
        or not {*sections} <= {*full}
        or not isinstance(first, dict)
        or not {*first} <= {*HEAD_FIELDS}
    ):
        why = f"it must give all layers with full attention the same {' and '.join(HEAD_FIELDS)}"
        raise unsupported_config_error("this `per_layer_config` is not supported", why)
    return first


def has_layer_inputs(config: HFConfig) -> bool:
    """Return whether each layer has an input from its tokens."""
    return config.get("hidden_size_per_layer_input", _gemma_style.LAYER_INPUT) != 0


def _has_values(config: HFConfig) -> bool:
    """Return whether layers with full attention have a projection of values."""
    return not config.get("attention_k_eq_v")


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    supported_fields = (
        *("attention_bias", "final_logit_softcapping", "layer_types", "num_kv_shared_layers"),
        *("per_layer_config", "rope_parameters", "sliding_window", "use_bidirectional_attention"),
    )
    # With "vision", only the tokens of images attend to later ones.
    if config.get("use_bidirectional_attention") not in (None, "vision"):
        why = f"config.json has {config['use_bidirectional_attention']!r:.60}"
        what = "`use_bidirectional_attention` is not supported for this family"
        raise unsupported_config_error(what, why)
    if has_experts(config):
        supported_fields = (*supported_fields, "num_experts")
    reject_unsupported_fields(config, *supported_fields)
    axis_sizes = sizes(config)
    if axis_sizes["heads"] % axis_sizes["full_kv_heads"]:
        why = f"{axis_sizes['full_kv_heads']} key and value heads of layers with full attention"
        raise invalid_config_error(f"{why} do not divide {axis_sizes['heads']} query heads")
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            axis_sizes,
            MAX_POSITIONS,
            rope=_read_rope(config, FULL_TYPE, axis_sizes["full_head_dim"]),
            activation=("hidden_activation", "gelu_pytorch_tanh"),
        ),
        block_type="sandwich_input",
        embed_scale=axis_sizes["embed"] ** 0.5,
        attn_scale=1.0,
        sliding_windows=_windows(config),
        local_rope=_read_rope(config, SLIDING_TYPE, axis_sizes["head_dim"]),
        has_plain_value_norm=True,
        has_key_values=not _has_values(config),
        has_layer_inputs=has_layer_inputs(config),
        experts_per_token=_experts_per_token(config, axis_sizes),
        router=Router(has_own_norm=True),
        reusing_layers=_reusing_layers(config),
        shape_groups=_shape_groups(config),
        final_logit_softcap=read_softcap(config, "final_logit_softcapping", None),
    )


def _experts_per_token(config: HFConfig, axis_sizes: Mapping[str, int]) -> int:
    """Return the number of experts per token, or 0 without experts."""
    if not has_experts(config):
        return 0
    count = _read_count(config, "top_k_experts")
    if count > axis_sizes["experts"]:
        why = f"top_k_experts is {count}, but there are {axis_sizes['experts']} experts"
        raise invalid_config_error(why)
    return count


def _read_rope(config: HFConfig, layer_type: str, head_dim: int) -> Rope:
    """Read the rotary embedding of a layer type."""
    parameters: Any = config.get("rope_parameters") or ROPE_PARAMETERS
    scaling: Any = parameters.get(layer_type) if isinstance(parameters, Mapping) else None
    if not isinstance(scaling, dict):
        why = f"rope_parameters is {parameters!r:.60}, it must have an object for {layer_type}"
        raise invalid_config_error(why)
    max_positions = read_size(config, "max_position_embeddings", MAX_POSITIONS)
    if scaling.get("rope_type") == "proportional":
        return read_proportional_rope(scaling, head_dim, max_positions=max_positions)
    return read_rope({"rope_parameters": scaling}, head_dim, max_positions=max_positions)


def _windows(config: HFConfig) -> tuple[int, ...]:
    """Return the sliding window of each layer.

    Raises:
        PrepError: `layer_types` is invalid, or the last layer has a sliding window.
    """
    layers = read_size(config, "num_hidden_layers", 30, MAX_LAYERS)
    windows = read_sliding_windows(
        config,
        layers,
        config.get("sliding_window", 512),
        lambda layer: (layer + 1) % PATTERN != 0 and layer + 1 != layers,
    )
    if windows[-1] != FULL_ATTENTION:
        raise invalid_config_error(f"the last of {layers} layer_types must be {FULL_TYPE}")
    return windows


def _reusing_layers(config: HFConfig) -> tuple[int, ...]:
    return _gemma_style.read_reusing_layers(config, _windows(config), default=0)


def _group_numbers(group: str, config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers of a group."""
    reusing = _reusing_layers(config)
    wide = reusing if config.get("use_double_wide_mlp") else ()
    numbers: list[int] = []
    for layer, window in enumerate(_windows(config)):
        mlp = WIDE_LAYERS if layer in wide else NARROW_LAYERS
        is_full = window == FULL_ATTENTION
        if layer in reusing:
            heads = REUSING_FULL_LAYERS if is_full else REUSING_SLIDING_LAYERS
        else:
            heads = FULL_LAYERS if is_full else SLIDING_LAYERS
        if group in (mlp, heads):
            numbers.append(layer)
    return tuple(numbers)


def _shape_groups(config: HFConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the groups of equally shaped layers and the numbers of their layers, without a group of all layers."""
    layers = len(_windows(config))
    numbers = {group: _group_numbers(group, config) for group in GROUP_PARAMETERS}
    return tuple((group, listed) for group, listed in numbers.items() if 0 < len(listed) < layers)


BIAS = if_set("attention_bias")
FULL_QUERIES = _gemma_style.queries(BIAS, head_dim="full_head_dim")
FULL_KEYS = _gemma_style.keys_and_values(
    BIAS, kv_heads="full_kv_heads", head_dim="full_head_dim", has_values=_has_values
)
GROUP_PARAMETERS: Mapping[str, Parameters] = {
    SLIDING_LAYERS: {**_gemma_style.queries(BIAS), **_gemma_style.keys_and_values(BIAS)},
    FULL_LAYERS: {**FULL_QUERIES, **FULL_KEYS},
    REUSING_SLIDING_LAYERS: _gemma_style.queries(BIAS),
    REUSING_FULL_LAYERS: FULL_QUERIES,
    NARROW_LAYERS: _gemma_style.gated_mlp(),
    WIDE_LAYERS: _gemma_style.gated_mlp("wide_mlp"),
}
GATE_UP = "experts expert_mlp embed <- experts.gate_up_proj: experts (gate_up={} expert_mlp) embed"
EXPERTS: Parameters = {
    **matrix("moe.router", "experts embed <- router.proj.weight: experts embed"),
    **matrix("moe.router.input_scale", "embed <- router.scale: embed"),
    **matrix("moe.router.expert_scale", "experts <- router.per_expert_scale: experts"),
    **matrix("moe.gate", GATE_UP.format(0)),
    **matrix("moe.up", GATE_UP.format(1)),
    **matrix("moe.down", "experts embed expert_mlp <- experts.down_proj: experts embed expert_mlp"),
    **_llama_style.rms_norms(
        mlp_branch_norm="post_feedforward_layernorm_1",
        moe_norm="pre_feedforward_layernorm_2",
        moe_post_norm="post_feedforward_layernorm_2",
    ),
}
# Groups that may have all layers of a model.
WHOLE_GROUPS = (FULL_LAYERS, NARROW_LAYERS)
FAMILY = _grouped_style.build_family(
    name="gemma4_text",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **_llama_style.SANDWICH_NORMS,
        **_gemma_style.layer_input_gate(has_layer_inputs),
        **_grouped_style.under_condition(EXPERTS, has_experts),
        "output.scale": Parameter(" <- layer_scalar: 1"),
    },
    groups={
        group: LayerGroup(parameters, partial(_group_numbers, group), group in WHOLE_GROUPS)
        for group, parameters in GROUP_PARAMETERS.items()
    },
    shared=_gemma_style.layer_inputs(has_layer_inputs),
)
