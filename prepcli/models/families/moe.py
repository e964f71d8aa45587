"""Families with LLaMA's attention, and experts in all layers: Mixtral, OLMo, Granite, GPT-OSS. No I/O, no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.core.json_values import JsonObject
from prepcli.models.architecture import read_positive
from prepcli.models.declaration import (
    Parameters,
    Sizes,
    by_name,
    linear,
    matrix,
    rms_norm,
    unless_false,
)
from prepcli.models.families._llama_style import (
    ALL_HEADS_QK_NORMS,
    BIASED_ATTENTION,
    FINAL_LAYER_NORM,
    OUTPUT_NORMS,
    PRE_LAYER_NORMS,
    PRE_NORMS,
    attention,
    heads_that_fill_width,
    partial_rope,
    read_experts_per_token,
    rope_reader,
    uniform_window,
    windows,
)
from prepcli.models.families._moe_style import (
    NUMBERED_EXPERTS,
    correction,
    experts,
    fused_experts,
    granite_shared_mlp,
    moe_like,
    normalized_router,
    shared_experts,
)
from prepcli.models.families.llama_extended import (
    GRANITE_FACTORS,
    SINKS,
    read_static_rope,
    windows_and_sinks,
)
from prepcli.models.layer_config import ClampedSwiglu, Router
from prepcli.models.parameters import HFConfig, Parameter, if_set, read_count, read_size
from prepcli.models.rope_config import Rope, check_rotary_dim, read_rope

# --- Granite: shared experts in some models


def _read_granite_shared_mlp(config: HFConfig) -> int:
    """Return the width of the shared experts, or 0 if there are none."""
    return read_count(config, "shared_intermediate_size", 0)


def _has_granite_shared_mlp(config: HFConfig) -> bool:
    return _read_granite_shared_mlp(config) > 0


GRANITE_SHARED = granite_shared_mlp("mlp.shared", "shared_mlp", _has_granite_shared_mlp)

# --- Phi-3.5-MoE: SparseMixer

# transformers does not adapt `dynamic` to the length in this family.
PHIMOE_ROPE_TYPES = {name: name for name in ("default", "linear", "llama3", "yarn", "longrope")}


def _read_phimoe_rope(config: HFConfig, sizes: Sizes) -> Rope:
    """Read the rotary embedding. A scaled one has a factor of cosine and sine for short and for long rows."""
    rope = read_rope(
        config,
        sizes["head_dim"],
        max_positions=read_size(config, "max_position_embeddings", 131_072),
        default_theta=1_000_000.0,
        rope_types=PHIMOE_ROPE_TYPES,
    )
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if rope.rope_type == "default" or not isinstance(scaling, Mapping):
        return rope
    short = scaling.get("short_mscale")
    long = scaling.get("long_mscale")
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


def _read_two_experts_per_token(config: HFConfig, sizes: Sizes) -> int:
    """Return 2: SparseMixer of transformers always chooses two. Raise PrepError for another number."""
    count = read_experts_per_token(config, sizes["experts"], default=2)
    if count != 2:
        why = f"num_experts_per_tok is {count}, and SparseMixer chooses 2"
        raise unsupported_config_error(f"{count} experts per token are not supported", why)
    return count


def _read_sparse_mixer(config: HFConfig, sizes: Sizes) -> Router:
    """Return the router. Raise PrepError if half of its range is not a number from 0 on."""
    jitter = config.get("router_jitter_noise", 0.01)
    if jitter == 0 and not isinstance(jitter, bool):
        return Router("sparse_mixer")
    half_range = read_positive({"router_jitter_noise": jitter}, "router_jitter_noise", 0.01)
    return Router("sparse_mixer", mixing_range=2 * half_range)


# --- GPT-OSS: sinks, and experts with biases

HAS_GPT_OSS_BIAS = unless_false("attention_bias")
# The rotary embedding of GptOssConfig if the config has none.
GPT_OSS_ROPE: JsonObject = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _gpt_oss_experts() -> Parameters:
    """Return the parameters of the experts. Gate and up alternate in the columns of one tensor."""
    # E.g. with mlp 4 column 0 is gate unit 0, column 1 is up unit 0, and column 6 is gate unit 3.
    gate_up = "experts mlp embed <- mlp.experts.gate_up_proj: experts embed (mlp gate_up={})"
    bias = "experts mlp <- mlp.experts.gate_up_proj_bias: experts (mlp gate_up={})"
    down_bias = "experts embed <- mlp.experts.down_proj_bias: experts embed"
    return {
        **linear("mlp.router", "experts embed <- mlp.router.weight: experts embed"),
        **matrix("mlp.gate", gate_up.format(0)),
        "mlp.gate.bias": Parameter(bias.format(0)),
        **matrix("mlp.up", gate_up.format(1)),
        "mlp.up.bias": Parameter(bias.format(1)),
        **matrix("mlp.down", "experts embed mlp <- mlp.experts.down_proj: experts mlp embed"),
        "mlp.down.bias": Parameter(down_bias),
    }


# --- Hunyuan and MiniMax


def _read_hunyuan_experts_per_token(config: HFConfig, sizes: Sizes) -> int:
    """Return the number of experts per token, which a config may list for each layer."""
    # transformers uses `num_experts_per_tok` if a config has both names.
    count = config.get("num_experts_per_tok", config.get("moe_topk", 1))
    if isinstance(count, list) and count:
        if any(other != count[0] for other in count):
            why = f"moe_topk is {count!r:.80}; layers have the same number of experts per token"
            raise unsupported_config_error("experts per token by layer are not supported", why)
        count = count[0]
    return read_experts_per_token({"num_experts_per_tok": count}, sizes["experts"], default=1)


def _read_minimax_rope(config: HFConfig, sizes: Sizes) -> Rope:
    head_dim = sizes["head_dim"]
    # Published files have the number of rotated elements.
    rotary_dim = check_rotary_dim(read_size(config, "rotary_dim", head_dim), head_dim, "rotary_dim")
    return partial_rope(rotary_dim / head_dim, 196_608, 5_000_000.0)(config, sizes)


FAMILIES = by_name(
    moe_like(
        "mixtral",
        "Mixtral: Mistral with a sparse MoE of a few large experts.",
        layer={**PRE_NORMS, **attention()},
        moe=NUMBERED_EXPERTS,
        defaults={"mlp": 14336, "kv_heads": 8},
        num_experts=8,
        count_fields=("num_experts", "num_local_experts"),
        experts_per_token=2,
        positions=131_072,
        rope_theta=1_000_000.0,
        norm_eps=1e-5,
        # MixtralConfig has no window by default, unlike MistralConfig with 4096.
        choices=uniform_window(None),
        ignores=("layer_types",),
    ),
    moe_like(
        "olmoe",
        "OLMoE: LLaMA with norms over the queries and keys of all heads, and a sparse MoE of many small experts.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **ALL_HEADS_QK_NORMS},
        defaults={"vocab": 50304, "embed": 2048, "mlp": 2048, "layers": 16, "heads": 16},
        num_experts=64,
        experts_per_token=8,
        more_sizes=heads_that_fill_width,
        positions=4096,
        norm_eps=1e-5,
        choices={"qk_norm_axes": "all_heads", **normalized_router(False)},
    ),
    moe_like(
        "flex_olmo",
        "FlexOlmo: the layers of OLMo 2 with a sparse MoE of experts that were trained apart.",
        layer={**OUTPUT_NORMS, **BIASED_ATTENTION, **ALL_HEADS_QK_NORMS},
        defaults={"vocab": 100_352},
        num_experts=7,
        experts_per_token=5,
        positions=4096,
        rope_theta=500_000.0,
        choices={"block_type": "output_norm", "qk_norm_axes": "all_heads", **normalized_router(False)},
    ),
    moe_like(
        "granitemoe",
        "Granite 3 MoE: Granite with a sparse MoE whose experts are fused into one tensor per matrix.",
        layer={**PRE_NORMS, **BIASED_ATTENTION},
        moe=fused_experts(),
        num_experts=8,
        count_fields=("num_local_experts",),
        experts_per_token=2,
        choices=GRANITE_FACTORS,
    ),
    moe_like(
        "granitemoeshared",
        "Granite 3 MoE with shared experts.",
        layer={**PRE_NORMS, **BIASED_ATTENTION},
        moe={**fused_experts(), **GRANITE_SHARED},
        num_experts=8,
        count_fields=("num_local_experts",),
        experts_per_token=2,
        shared_mlp=lambda config, sizes: max(1, _read_granite_shared_mlp(config)),
        choices=GRANITE_FACTORS,
    ),
    moe_like(
        "granitemoe_swa",
        "Granite MoE with sliding windows in three of four layers, attention sinks, and a rotary base per layer.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **SINKS},
        moe={
            **fused_experts("experts.gate_up_proj", "experts.down_proj", "router.weight"),
            **GRANITE_SHARED,
        },
        num_experts=8,
        count_fields=("num_local_experts",),
        experts_per_token=2,
        shared_mlp=lambda config, sizes: max(1, _read_granite_shared_mlp(config)),
        choices={**GRANITE_FACTORS, **windows_and_sinks(max_positions=2048)},
    ),
    moe_like(
        "phimoe",
        "Phi-3.5-MoE: layer norms, and experts mixed by SparseMixer. Training chooses them as evaluation does.",
        layer={**PRE_LAYER_NORMS, **BIASED_ATTENTION},
        moe=NUMBERED_EXPERTS,
        defaults={"vocab": 32064, "mlp": 6400, "kv_heads": 8},
        num_experts=16,
        count_fields=("num_local_experts",),
        experts_per_token=_read_two_experts_per_token,
        positions=131_072,
        rope=_read_phimoe_rope,
        norm_eps=1e-5,
        choices={"norm": "layer", **uniform_window(None), "router": _read_sparse_mixer},
        final_norm=FINAL_LAYER_NORM,
        head=linear("head", "vocab embed <- lm_head.weight: vocab embed", if_set("lm_head_bias")),
    ),
    moe_like(
        "gpt_oss",
        "GPT-OSS: attention with sinks and alternating windows, and experts with biases and a clamped SwiGLU.",
        layer={**PRE_NORMS, **attention(bias=HAS_GPT_OSS_BIAS, out_bias=HAS_GPT_OSS_BIAS), **SINKS},
        moe=_gpt_oss_experts(),
        defaults={
            "vocab": 201_088,
            "embed": 2880,
            "mlp": 2880,
            "layers": 36,
            "heads": 64,
            "kv_heads": 8,
            "head_dim": 64,
        },
        num_experts=128,
        count_fields=("num_experts", "num_local_experts"),
        experts_per_token=4,
        positions=131_072,
        rope=rope_reader(131_072, 150_000.0, GPT_OSS_ROPE),
        norm_eps=1e-5,
        choices={
            "sliding_windows": windows(128, lambda layer: layer % 2 == 0),
            "clamped_swiglu": lambda config, sizes: ClampedSwiglu(
                alpha=read_positive(config, "swiglu_alpha", 1.702), limit=read_positive(config, "swiglu_limit", 7.0)
            ),
            "has_attention_sinks": True,
        },
        dropped={},
    ),
    moe_like(
        "hunyuan_v1_moe",
        "Hunyuan V1 MoE: Hunyuan V1 with a sparse MoE and shared experts.",
        layer={
            **PRE_NORMS,
            **BIASED_ATTENTION,
            **rms_norm("attn.q_norm", "head_dim <- self_attn.query_layernorm.weight: head_dim"),
            **rms_norm("attn.k_norm", "head_dim <- self_attn.key_layernorm.weight: head_dim"),
        },
        moe={**experts(router="mlp.gate.wg.weight"), **shared_experts("mlp.shared_mlp")},
        defaults={"vocab": 290_943},
        num_experts=1,
        experts_per_token=_read_hunyuan_experts_per_token,
        shared_mlp=lambda config, sizes: sizes["mlp"],
        rope=read_static_rope,
        norm_eps=1e-5,
        choices={"rotates_before_qk_norm": True},
        # Published files have `use_qk_norm`. The class always has the norms.
        ignores=("use_qk_norm",),
    ),
    moe_like(
        "minimax_m2",
        "MiniMax-M2: norms over all queries and keys, partial rotation, and experts by corrected sigmoid scores.",
        layer={**PRE_NORMS, **attention(), **ALL_HEADS_QK_NORMS},
        moe={
            **NUMBERED_EXPERTS,
            "mlp.router.correction.bias": correction(
                "block_sparse_moe.e_score_correction_bias: experts", alternate="mlp.e_score_correction_bias: experts"
            ),
        },
        defaults={
            "vocab": 200_064,
            "embed": 3072,
            "mlp": 1536,
            "layers": 62,
            "heads": 48,
            "kv_heads": 8,
            "head_dim": 128,
        },
        num_experts=256,
        count_fields=("num_experts", "num_local_experts"),
        experts_per_token=8,
        positions=196_608,
        rope=_read_minimax_rope,
        choices={"qk_norm_axes": "all_heads", "router": Router("sigmoid")},
        # Published files have `use_qk_norm`. The class always has the norms.
        ignores=("use_qk_norm",),
    ),
)  # fmt: skip
