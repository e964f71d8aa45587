"""Families with LLaMA's attention, and experts or a dense MLP in each layer: Qwen, Llama 4, ERNIE. No I/O, no jax."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.core.json_values import JsonObject
from prepcli.models.architecture import (
    LAYER_TYPES,
    NO_CHUNK,
    read_positive,
    read_sliding_windows,
    uniform_windows,
    windows_by_layer_type,
)
from prepcli.models.declaration import Parameters, Sizes, by_name, matrix, unless_false
from prepcli.models.families._llama_style import (
    BIASED_ATTENTION,
    PRE_NORMS,
    QK_NORMS,
    attention,
    full_layers,
    gated_mlp,
    layer_rope,
    read_experts_per_token,
    read_layers_without_rope,
    read_qwen_window,
    windows,
)
from prepcli.models.families._moe_style import (
    EXPERTS,
    GATED_SHARED_EXPERTS,
    correction,
    moe_like,
    normalized_router,
    read_dense_layers_by_step,
    read_dense_layers_by_type,
    shared_experts,
    shared_width,
)
from prepcli.models.layer_config import Router
from prepcli.models.parameters import HFConfig, Parameter, read_count, read_size
from prepcli.models.rope_config import QueryScale

# --- Qwen and Mellum


def _qwen2_moe_windows(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    """Return windows in layers 0, 2, 4 and so on, below `max_window_layers`, as in Qwen2MoeConfig."""
    last = read_count(config, "max_window_layers", 28)
    window = read_qwen_window(config)
    return read_sliding_windows(
        config, sizes["layers"], window, lambda layer: layer % 2 == 0 and layer < last
    )


def _qwen3_moe_experts() -> Parameters:
    """Return the parameters of Qwen3's experts. Files of Qwen3-VL-MoE have the fused tensors transposed."""
    gate_up = "experts mlp embed <- mlp.experts.gate_up_proj: experts embed (gate_up={} mlp)"
    transposed = {
        "mlp.gate.weight": gate_up.format(0),
        "mlp.up.weight": gate_up.format(1),
        "mlp.down.weight": "experts embed mlp <- mlp.experts.down_proj: experts mlp embed",
    }
    parameters = dict(EXPERTS)
    for path, row in transposed.items():
        parameters[path] = dataclasses.replace(parameters[path], transposed=row)
    return parameters


def _check_mellum_rope(config: HFConfig, sizes: Sizes) -> None:
    """Raise PrepError for the rotary fields of transformers 4, which MellumConfig does not read."""
    for field in ("rope_scaling", "rope_theta"):
        if value := config.get(field):
            why = f"config.json has {value!r:.60}; this family reads `rope_parameters`"
            raise unsupported_config_error(f"`{field}` is not supported for this family", why)


# --- Flint


def _flint_windows(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    """Return windows in all layers but the first two, every fourth one and the last one."""
    window = config.get("sliding_window", 513)
    last = sizes["layers"] - 1
    return read_sliding_windows(
        config,
        sizes["layers"],
        window,
        lambda layer: layer >= 2 and layer % 4 != 1 and layer != last,
    )


def _flint_dense_layers(config: HFConfig, layers: int) -> tuple[int, ...]:
    """Return the dense layers by Qwen's fields, by default the first two."""
    listed = config.get("mlp_only_layers")
    fields: JsonObject = {
        "mlp_only_layers": [0, 1] if listed is None else listed,
        "decoder_sparse_step": config.get("decoder_sparse_step"),
    }
    return read_dense_layers_by_step(fields, layers)


# --- Llama 4: chunks, and layers without rotation

CHUNKED = "chunked_attention"


def _llama4_chunk(config: HFConfig, sizes: Sizes) -> int:
    """Return the number of positions of a chunk, or NO_CHUNK for a null."""
    if config.get("attention_chunk_size", 8192) is None:
        return NO_CHUNK
    return read_size(config, "attention_chunk_size", 8192)


def _llama4_chunked_layers(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    """Return the layers with chunks: the listed ones, or the layers that rotate."""
    layers = sizes["layers"]
    chunk = _llama4_chunk(config, sizes)
    listed = config.get("layer_types")
    if listed is None:
        unrotated = read_layers_without_rope(config, sizes)
        return tuple(layer for layer in range(layers) if chunk and layer not in unrotated)
    marks = windows_by_layer_type(
        listed, (LAYER_TYPES[0], CHUNKED), layers=layers, window=1, field="layer_types"
    )
    chunked = tuple(layer for layer, mark in enumerate(marks) if mark)
    if chunked and chunk == NO_CHUNK:
        raise invalid_config_error(f"layer_types has {CHUNKED}, but there is no chunk size")
    return chunked


def _llama4_query_scale(config: HFConfig, sizes: Sizes) -> QueryScale | None:
    """Return the factor of the queries of layers without rotation. None if the config turns it off."""
    if not config.get("attn_temperature_tuning", True):
        return None
    return QueryScale(
        beta=read_positive(config, "attn_scale", 0.1),
        step_length=read_size(config, "floor_scale", 8192),
        offset=1,
    )


def _llama4_dense_layers(config: HFConfig, layers: int) -> tuple[int, ...]:
    """Return the layers between the steps of `interleave_moe_layer_step`, or without an entry in `moe_layers`."""
    step = read_size(config, "interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers")
    if sparse is None:
        return tuple(layer for layer in range(layers) if (layer + 1) % step)
    if not isinstance(sparse, list):
        raise invalid_config_error(f"moe_layers is {sparse!r:.80}, it must be a list of layers")
    return tuple(layer for layer in range(layers) if layer not in sparse)


def _llama4_experts() -> Parameters:
    """Return the parameters of the experts, the router and the shared expert. The gate comes before up."""
    experts = "feed_forward.experts"
    gate_up = f"experts mlp embed <- {experts}.gate_up_proj: experts embed (gate_up={{}} mlp)"
    return {
        **matrix("mlp.router", "experts embed <- feed_forward.router.weight: experts embed"),
        **matrix("mlp.gate", gate_up.format(0)),
        **matrix("mlp.up", gate_up.format(1)),
        **matrix("mlp.down", f"experts embed mlp <- {experts}.down_proj: experts mlp embed"),
        **shared_experts("feed_forward.shared_expert"),
    }


# --- ERNIE 4.5


def _ernie_dense_layers(config: HFConfig, layers: int) -> tuple[int, ...]:
    """Return the layers outside of a range, and the layers between the steps of `moe_layer_interval`."""
    interval = read_size(config, "moe_layer_interval", 1)
    first = config.get("moe_layer_start_index", 1)
    last = config.get("moe_layer_end_index", -1)
    # `isinstance` would accept true for an integer.
    if type(first) is not int or type(last) is not int:
        why = f"moe_layer_start_index and moe_layer_end_index are {first!r:.40} and {last!r:.40}"
        raise invalid_config_error(f"{why}, they must be integers")
    if last == -1:
        last = layers - 1
    # Ernie4_5_MoeDecoderLayer has experts in all other layers.
    return tuple(
        layer for layer in range(layers) if (layer + 1) % interval or not first <= layer <= last
    )


def _read_ernie_experts_per_token(config: HFConfig, sizes: Sizes) -> int:
    # transformers uses `num_experts_per_tok` if a config has both names.
    return read_experts_per_token(config, sizes["experts"], read_size(config, "moe_k", 6))


def _read_ernie_shared_experts(config: HFConfig) -> int:
    return read_count(config, "moe_num_shared_experts", 2)


def _check_ernie_biases(config: HFConfig, sizes: Sizes) -> None:
    """Raise PrepError for biases on all projections."""
    if config.get("use_bias"):
        why = "config.json has true, which adds a bias to all projections"
        raise unsupported_config_error("`use_bias` is not supported for this family", why)


FAMILIES = by_name(
    moe_like(
        "qwen2_moe",
        "Qwen2-MoE: Qwen2 with a sparse MoE, and shared experts with a gate.",
        layer={**PRE_NORMS, **attention(bias=unless_false("qkv_bias"))},
        moe=GATED_SHARED_EXPERTS,
        defaults={"vocab": 151_936, "embed": 2048, "mlp": 5632, "layers": 24, "heads": 16, "kv_heads": 16},
        num_experts=60,
        count_fields=("num_experts",),
        experts_per_token=4,
        expert_mlp=1408,
        shared_mlp=shared_width(5632),
        dense_layers=read_dense_layers_by_step,
        positions=32768,
        choices={"sliding_windows": _qwen2_moe_windows, **normalized_router(False)},
    ),
    moe_like(
        "qwen3_moe",
        "Qwen3-MoE: Qwen3 with a sparse MoE of many small experts.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **QK_NORMS},
        moe=_qwen3_moe_experts(),
        defaults={"vocab": 151_936, "embed": 2048, "mlp": 6144, "layers": 24, "kv_heads": 4},
        num_experts=128,
        experts_per_token=8,
        expert_mlp=768,
        dense_layers=read_dense_layers_by_step,
        positions=32768,
        choices={
            "sliding_windows": lambda config, sizes: uniform_windows(sizes["layers"], read_qwen_window(config)),
            **normalized_router(False),
        },
        ignores=("layer_types", "use_qk_norm"),
    ),
    moe_like(
        "mellum",
        "Mellum 2: Qwen3-MoE with sliding windows in listed layers, and a rotary embedding per layer type.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **QK_NORMS},
        defaults={"vocab": 98304, "embed": 2304, "mlp": 7168, "layers": 28, "kv_heads": 4, "head_dim": 128},
        num_experts=64,
        experts_per_token=8,
        expert_mlp=896,
        dense_layers=read_dense_layers_by_type,
        positions=131_072,
        rope=layer_rope(LAYER_TYPES[0], 131_072, 500_000.0),
        choices={
            "local_rope": layer_rope(LAYER_TYPES[1], 131_072, 10_000.0),
            "sliding_windows": windows(1024, lambda layer: False),
            **normalized_router(True),
        },
        check=_check_mellum_rope,
    ),
    moe_like(
        "flint",
        "Flint: attention with sinks that rotates in sliding layers only, and experts chosen by sigmoid scores.",
        layer={
            **PRE_NORMS,
            **BIASED_ATTENTION,
            **QK_NORMS,
            "attn.sinks.bias": Parameter(
                "heads <- self_attn.softmax_offset: heads", alternate="heads <- self_attn.sinks: heads"
            ),
        },
        moe={**EXPERTS, **shared_experts("mlp.shared_expert")},
        defaults={
            "vocab": 150_144,
            "embed": 2048,
            "mlp": 6144,
            "layers": 49,
            "heads": 32,
            "kv_heads": 4,
            "head_dim": 128,
        },
        num_experts=256,
        count_fields=("num_experts",),
        experts_per_token=6,
        expert_mlp=512,
        shared_mlp=shared_width(1024),
        dense_layers=_flint_dense_layers,
        positions=262_144,
        choices={
            "sliding_windows": _flint_windows,
            "layers_without_rope": full_layers(_flint_windows),
            "has_attention_sinks": True,
            **normalized_router(True, scores="sigmoid"),
        },
    ),
    moe_like(
        "llama4_text",
        "Llama 4 (text model): attention in chunks, layers without rotation, and sigmoid scores on inputs of experts.",
        layer={**PRE_NORMS, **BIASED_ATTENTION},
        moe=_llama4_experts(),
        defaults={
            "vocab": 202_048,
            "embed": 5120,
            "mlp": 8192,
            "layers": 48,
            "heads": 40,
            "kv_heads": 8,
            "head_dim": 128,
        },
        num_experts=16,
        count_fields=("num_local_experts",),
        experts_per_token=1,
        shared_mlp=lambda config, sizes: sizes["mlp"],
        more_sizes=lambda config, sizes: {"dense_mlp": read_size(config, "intermediate_size_mlp", 16384)},
        dense_layers=_llama4_dense_layers,
        dense_mlp=gated_mlp(module="feed_forward", mlp="dense_mlp"),
        positions=131_072,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        choices={
            "rotary_pairs": "interleaved",
            "layers_without_rope": read_layers_without_rope,
            "query_scale": _llama4_query_scale,
            "attention_chunk": _llama4_chunk,
            "chunked_layers": _llama4_chunked_layers,
            "has_plain_qk_norm": lambda config, sizes: config.get("use_qk_norm") in (None, True),
            "rotates_before_qk_norm": True,
            "router": Router("sigmoid", is_normalized=False, scales_input=True),
        },
    ),
    moe_like(
        "ernie4_5_moe",
        "ERNIE 4.5 MoE: interleaved rotary pairs, and experts chosen by corrected softmax scores.",
        layer={**PRE_NORMS, **attention()},
        moe={
            **EXPERTS,
            "mlp.router.correction.bias": correction("mlp.moe_statics.e_score_correction_bias: 1 experts"),
            **shared_experts("mlp.shared_experts", lambda config: _read_ernie_shared_experts(config) > 0),
        },
        defaults={"vocab": 103_424, "embed": 2560, "mlp": 12288, "layers": 28, "heads": 20, "kv_heads": 4},
        num_experts=64,
        count_fields=("num_experts", "moe_num_experts"),
        experts_per_token=_read_ernie_experts_per_token,
        expert_mlp=1536,
        shared_mlp=lambda config, sizes: sizes["mlp"] * max(1, _read_ernie_shared_experts(config)),
        dense_layers=_ernie_dense_layers,
        positions=131_072,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        choices={
            "rotary_pairs": "interleaved",
            "router": lambda config, sizes: Router(min_weight_sum=read_positive(config, "moe_norm_min", 1e-12)),
        },
        check=_check_ernie_biases,
        tied=True,
    ),
)  # fmt: skip
