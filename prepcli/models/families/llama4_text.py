"""Llama 4 (text model): attention in chunks, layers without rotation, and sigmoid scores on the input of experts."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import invalid_config_error
from prepcli.models.architecture import (
    LAYER_TYPES,
    NO_CHUNK,
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
    windows_by_layer_type,
)
from prepcli.models.families import _llama_style, _moe_style
from prepcli.models.moe_config import Router
from prepcli.models.parameters import MAX_LAYERS, HFConfig, if_set, read_size
from prepcli.models.rope_config import QueryScale
from prepcli.models.rows import Parameters, matrix

HAS_BIAS = if_set("attention_bias")
MAX_POSITIONS = 131072
CHUNKED = "chunked_attention"


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Llama4TextConfig."""
    axis_sizes = _llama_style.sizes(
        config,
        vocab=202048,
        embed=5120,
        mlp=8192,
        layers=48,
        heads=40,
        kv_heads=8,
        head_dim=128,
    )
    return {
        **axis_sizes,
        **_moe_style.layer_sizes(axis_sizes["layers"], dense_layers(config)),
        "dense_mlp": read_size(config, "intermediate_size_mlp", 16384),
        "shared_mlp": axis_sizes["mlp"],
        "experts": read_size(config, "num_local_experts", 16),
        "gate_up": 2,
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP.

    Raises:
        PrepError: `moe_layers` is not a list, or a field is invalid.
    """
    layers = read_size(config, "num_hidden_layers", 48, MAX_LAYERS)
    step = read_size(config, "interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers")
    if sparse is None:
        return tuple(layer for layer in range(layers) if (layer + 1) % step)
    if not isinstance(sparse, list):
        raise invalid_config_error(f"moe_layers is {sparse!r:.80}, it must be a list of layers")
    return tuple(layer for layer in range(layers) if layer not in sparse)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config,
        *ROPE_FIELDS,
        *("attention_bias", "attention_chunk_size", "layer_types", "no_rope_layers"),
        *("num_local_experts", "use_qk_norm"),
    )
    axis_sizes = sizes(config)
    layers = axis_sizes["layers"]
    rotates = _llama_style.read_rotating_layers(config, layers)
    chunk = _read_chunk(config)
    plain = _llama_style.arch_config(
        config,
        axis_sizes,
        max_positions=MAX_POSITIONS,
        norm_eps=("rms_norm_eps", 1e-5),
        rope_theta=500_000.0,
    )
    return dataclasses.replace(
        plain,
        rotary_pairs="interleaved",
        layers_without_rope=tuple(layer for layer in range(layers) if not rotates[layer]),
        query_scale=_read_query_scale(config),
        attention_chunk=chunk,
        chunked_layers=_read_chunked_layers(config, rotates, chunk),
        has_plain_qk_norm=config.get("use_qk_norm") in (None, True),
        rotates_before_qk_norm=True,
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=1
        ),
        router=Router("sigmoid", is_normalized=False, scales_input=True),
        dense_layers=dense_layers(config),
    )


def _read_chunk(config: HFConfig) -> int:
    """Return the number of positions of a chunk, or NO_CHUNK for a null."""
    if config.get("attention_chunk_size", 8192) is None:
        return NO_CHUNK
    return read_size(config, "attention_chunk_size", 8192)


def _read_chunked_layers(config: HFConfig, rotates: list[bool], chunk: int) -> tuple[int, ...]:
    """Return the layers with chunks: the listed ones, or the layers that rotate.

    Raises:
        PrepError: `layer_types` is invalid, or lists chunks without a size.
    """
    layers = len(rotates)
    listed = config.get("layer_types")
    if listed is None:
        return tuple(layer for layer, rotate in enumerate(rotates) if rotate and chunk)
    marks = windows_by_layer_type(
        listed, (LAYER_TYPES[0], CHUNKED), layers=layers, window=1, field="layer_types"
    )
    chunked = tuple(layer for layer, mark in enumerate(marks) if mark)
    if chunked and chunk == NO_CHUNK:
        raise invalid_config_error(f"layer_types has {CHUNKED}, but there is no chunk size")
    return chunked


def _read_query_scale(config: HFConfig) -> QueryScale | None:
    """Return the factor of the queries of layers without rotation. None if the config turns it off."""
    if not config.get("attn_temperature_tuning", True):
        return None
    return QueryScale(
        beta=read_positive(config, "attn_scale", 0.1),
        step_length=read_size(config, "floor_scale", 8192),
        offset=1,
    )


def _experts() -> Parameters:
    """Return the parameters of the experts, the router and the shared expert. The gate comes before up."""
    gate_up = (
        "experts mlp embed <- feed_forward.experts.gate_up_proj: experts embed (gate_up={} mlp)"
    )
    down = "experts embed mlp <- feed_forward.experts.down_proj: experts mlp embed"
    return {
        **matrix("mlp.router", "experts embed <- feed_forward.router.weight: experts embed"),
        **matrix("mlp.gate", gate_up.format(0)),
        **matrix("mlp.up", gate_up.format(1)),
        **matrix("mlp.down", down),
        **_moe_style.shared_experts("feed_forward.shared_expert"),
    }


FAMILY = _moe_style.build_family(
    name="llama4_text",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
    },
    moe=_experts(),
    dense_layers=dense_layers,
    dense_mlp=_moe_style.dense_layer_mlp("feed_forward"),
)
