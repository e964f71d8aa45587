"""Phi-3.5-MoE: layer norms, and experts mixed by SparseMixer. Training chooses them as evaluation does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from prepcli.algebra.axis_map import LAYERS
from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models import rows
from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
    uniform_windows,
)
from prepcli.models.families import _llama_style
from prepcli.models.moe_config import Router
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rope_config import Rope, read_rope
from prepcli.models.rows import embedding, linear, stack

HAS_BIAS = if_set("attention_bias")
MAX_POSITIONS = 131072
# transformers does not adapt `dynamic` to the length in this family.
ROPE_TYPES = {name: name for name in ("default", "linear", "llama3", "yarn", "longrope")}
# SparseMixer of transformers always chooses two.
EXPERTS_PER_TOKEN = 2


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of PhimoeConfig."""
    axis_sizes = _llama_style.sizes(config, vocab=32064, mlp=6400, kv_heads=8)
    return {**axis_sizes, "experts": read_size(config, "num_local_experts", 16), "gate_up": 2}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config,
        *ROPE_FIELDS,
        *("attention_bias", "lm_head_bias", "sliding_window"),
        *("num_local_experts", "router_jitter_noise"),
    )
    axis_sizes = sizes(config)
    count = _llama_style.read_experts_per_token(
        config, axis_sizes["experts"], default=EXPERTS_PER_TOKEN
    )
    if count != EXPERTS_PER_TOKEN:
        why = f"num_experts_per_tok is {count}, and SparseMixer chooses {EXPERTS_PER_TOKEN}"
        raise unsupported_config_error(f"{count} experts per token are not supported", why)
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            axis_sizes,
            max_positions=MAX_POSITIONS,
            rope=_read_rope(config, axis_sizes["head_dim"]),
            norm_eps=("rms_norm_eps", 1e-5),
        ),
        norm="layer",
        sliding_windows=uniform_windows(axis_sizes["layers"], config.get("sliding_window")),
        experts_per_token=count,
        router=Router("sparse_mixer", mixing_range=2 * _read_jitter(config)),
    )


def _read_jitter(config: HFConfig) -> float:
    """Return half of the range of SparseMixer. Raise PrepError if it is not a number from 0 on."""
    jitter = config.get("router_jitter_noise", 0.01)
    if jitter == 0 and not isinstance(jitter, bool):
        return 0.0
    return read_positive({"router_jitter_noise": jitter}, "router_jitter_noise", 0.01)


def _read_rope(config: HFConfig, head_dim: int) -> Rope:
    """Read the rotary embedding. A scaled one has a factor of cosine and sine for short and for long rows.

    Raises:
        PrepError: The two factors differ, or a field is invalid.
    """
    positions = read_size(config, "max_position_embeddings", MAX_POSITIONS)
    rope = read_rope(
        config, head_dim, max_positions=positions, default_theta=1e6, rope_types=ROPE_TYPES
    )
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if rope.rope_type == "default" or not isinstance(scaling, Mapping):
        return rope
    short, long = scaling.get("short_mscale"), scaling.get("long_mscale")
    if short is None or scaling.get("original_max_position_embeddings") is None:
        why = (
            "its rope scaling needs short_mscale, long_mscale and original_max_position_embeddings"
        )
        raise invalid_config_error(why)
    if short != long:
        why = f"short_mscale is {short!r:.40}, and long_mscale is {long!r:.40}"
        raise unsupported_config_error("a factor of rotations by length is not supported", why)
    return dataclasses.replace(
        rope,
        attention_factor=read_positive(scaling, "short_mscale", 1.0),
        # transformers takes the short factors for rows of any length.
        long_factors=rope.short_factors,
    )


LAYER = {
    **_llama_style.PRE_LAYER_NORMS,
    **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
    **_llama_style.experts(
        # An expert is w2(silu(w1 x) * w3 x), as in Mixtral.
        gate="block_sparse_moe.experts.{experts}.w1.weight",
        up="block_sparse_moe.experts.{experts}.w3.weight",
        down="block_sparse_moe.experts.{experts}.w2.weight",
        router="block_sparse_moe.gate.weight",
    ),
}
FAMILY = rows.build_family(
    name="phimoe",
    prefix=_llama_style.TENSOR_PREFIX,
    sizes=sizes,
    arch_config=arch_config,
    parameters={
        **embedding("tokens", "vocab embed <- embed_tokens.weight: vocab embed"),
        **stack(LAYERS, "layers.{layers}", LAYER),
        **_llama_style.FINAL_LAYER_NORM,
        **linear("head", "vocab embed <- lm_head.weight: vocab embed", if_set("lm_head_bias")),
    },
    tied_by_default=False,
    dropped=_llama_style.LEGACY_BUFFERS,
)
