"""ERNIE 4.5 MoE: interleaved rotary pairs, and experts chosen by corrected softmax scores."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style, _moe_style
from prepcli.models.moe_config import Router
from prepcli.models.parameters import MAX_LAYERS, HFConfig, read_count, read_size

# (alias, field): transformers accepts both names. The alias is used if both are set.
EXPERT_COUNT = ("num_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k")
SHARED_COUNT = "moe_num_shared_experts"


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Ernie4_5_MoeConfig."""
    axis_sizes = _llama_style.sizes(
        config, vocab=103424, embed=2560, mlp=12288, layers=28, heads=20, kv_heads=4
    )
    expert_width = read_size(config, "moe_intermediate_size", 1536)
    return {
        **axis_sizes,
        **_moe_style.layer_sizes(axis_sizes["layers"], dense_layers(config)),
        "mlp": expert_width,
        "dense_mlp": axis_sizes["mlp"],
        "shared_mlp": expert_width * max(1, _num_shared_experts(config)),
        "experts": _read_alias(config, EXPERT_COUNT, 64),
        "gate_up": 2,
    }


def _read_alias(config: HFConfig, names: tuple[str, str], default: int) -> int:
    """Return the size in a field or in its alias. The alias is used if both are set."""
    alias, field = names
    return read_size(config, alias, read_size(config, field, default))


def _num_shared_experts(config: HFConfig) -> int:
    return read_count(config, SHARED_COUNT, 2)


def _has_shared_experts(config: HFConfig) -> bool:
    return _num_shared_experts(config) > 0


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP.

    Raises:
        PrepError: A field of the MoE layers is invalid.
    """
    layers = read_size(config, "num_hidden_layers", 28, MAX_LAYERS)
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


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "num_experts", "moe_layer_start_index")
    if config.get("use_bias"):
        why = "config.json has true, which adds a bias to all projections"
        raise unsupported_config_error("`use_bias` is not supported for this family", why)
    axis_sizes = sizes(config)
    experts_per_token = _read_alias(config, EXPERTS_PER_TOKEN, 6)
    router = Router(min_weight_sum=read_positive(config, "moe_norm_min", 1e-12))
    router.check_experts(axis_sizes["experts"], experts_per_token)
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=131072, rope_theta=500_000.0),
        norm_eps=read_positive(config, "rms_norm_eps", 1e-5),
        rotary_pairs="interleaved",
        experts_per_token=experts_per_token,
        router=router,
        dense_layers=dense_layers(config),
    )


FAMILY = _moe_style.build_family(
    name="ernie4_5_moe",
    sizes=sizes,
    arch_config=arch_config,
    layer={**_llama_style.PRE_NORMS, **_llama_style.attention()},
    moe={
        **_moe_style.EXPERTS,
        "mlp.router.correction.bias": _moe_style.correction(
            "mlp.moe_statics.e_score_correction_bias: 1 experts"
        ),
        **_moe_style.shared_experts("mlp.shared_experts", _has_shared_experts),
    },
    dense_layers=dense_layers,
    tied_by_default=True,
)
