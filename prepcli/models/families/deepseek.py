"""DeepSeek's families, and kin with its latent attention (arXiv:2405.04434) or with its experts. No I/O, no jax."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.architecture import read_positive, read_sliding_windows
from prepcli.models.declaration import (
    Choices,
    Parameters,
    Sizes,
    by_name,
    grouped_qkv,
    linear,
    matrix,
    positive,
    rms_norm,
    under_condition,
    unless_false,
    with_aliases,
)
from prepcli.models.families._llama_style import (
    BIASED_ATTENTION,
    PRE_NORMS,
    QK_NORMS,
    attention,
    gated_mlp,
    llama_like,
    partial_rope,
    read_experts_per_token,
)
from prepcli.models.families._moe_style import (
    CORRECTED_EXPERTS,
    CORRECTION,
    EXPERTS,
    check_first_dense_layers,
    correction,
    deepseek_like,
    experts,
    first_dense_layers,
    moe_like,
    read_dense_layers_by_type,
    read_listed_or_first_layer,
    shared_count,
    shared_experts,
)
from prepcli.models.families.other_norms import EXAONE4_WINDOWS
from prepcli.models.layer_config import Router
from prepcli.models.parameters import HFConfig, if_set, read_count, read_size
from prepcli.models.rope_config import ROPE_TYPES, Rope, read_rope, yarn_scores_scale

HAS_BIAS = if_set("attention_bias")

# --- Latent attention


def latent_sizes(
    config: HFConfig,
    sizes: Sizes,
    *,
    kv_rank: int = 512,
    q_rank: int = 1536,
    key_dim: int = 128,
    value_dim: int = 128,
    rope_dim: int = 64,
    has_head_dim: bool = True,
) -> dict[str, int]:
    """Return the extents of latent attention.

    The arguments are the defaults of the fields. With `has_head_dim`, `head_dim` must be the number of rotated
    elements.
    """
    if sizes["kv_heads"] != sizes["heads"]:
        why = f"num_key_value_heads is {sizes['kv_heads']}; latent attention has as many as query heads"
        raise invalid_config_error(f"{why}, {sizes['heads']}")
    rope_dim = read_size(config, "qk_rope_head_dim", rope_dim)
    # transformers writes the number of rotated elements as `head_dim`.
    if has_head_dim and read_size(config, "head_dim", rope_dim) != rope_dim:
        why = f"head_dim is {config['head_dim']}, but qk_rope_head_dim is {rope_dim}"
        raise invalid_config_error(why)
    key_dim = read_size(config, "qk_nope_head_dim", key_dim)
    value_dim = read_size(config, "v_head_dim", value_dim)
    kv_rank = read_size(config, "kv_lora_rank", kv_rank)
    return {
        "head_dim": key_dim + rope_dim,
        "rope_dim": rope_dim,
        "value_dim": value_dim,
        "kv_dim": key_dim + value_dim,
        "kv_rank": kv_rank,
        # Rows of the fused tensor `kv_a_proj_with_mqa`
        "kv_latent": kv_rank + rope_dim,
        "q_rank": read_size(config, "q_lora_rank", q_rank),
    }


def _read_latent_rope(
    config: HFConfig, sizes: Sizes, positions: int, names: tuple[str, ...] = ()
) -> Rope:
    """Return the rotary embedding of a part of each head.

    `names` are other names of YaRN.
    """
    return read_rope(
        config,
        sizes["rope_dim"],
        max_positions=read_size(config, "max_position_embeddings", positions),
        rope_types={**ROPE_TYPES, **dict.fromkeys(names, "yarn")},
    )


LATENT_CHOICES: Choices = {
    "attn_scale": lambda config, sizes: sizes["head_dim"] ** -0.5 * yarn_scores_scale(config),
    "latent_key_dim": lambda config, sizes: sizes["head_dim"] - sizes["rope_dim"],
}
# Neighbouring elements rotate together, unless `rope_interleave` is false.
INTERLEAVED_CHOICES: Choices = {
    **LATENT_CHOICES,
    "rotary_pairs": lambda config, sizes: (
        "interleaved" if config.get("rope_interleave", True) else "half_split"
    ),
}


def _has_query_latent(config: HFConfig) -> bool:
    # An absent field has a default. A null means no latent.
    return config.get("q_lora_rank", 1) is not None


def latent_attention(
    has_query_latent: Callable[[HFConfig], bool] = _has_query_latent,
) -> Parameters:
    """Return the parameters of latent attention.

    `has_query_latent` decides whether the queries of a config come from a latent.
    """

    def has_plain_queries(config: HFConfig) -> bool:
        return not has_query_latent(config)

    # The first rows of kv_a_proj_with_mqa are the latent, the last ones the shared rotated key.
    fused = "self_attn.kv_a_proj_with_mqa.weight"
    queries = "heads head_dim {0} <- self_attn.{1}.weight: (heads head_dim) {0}"
    query_latent = {
        **linear(
            "attn.q_down", "q_rank embed <- self_attn.q_a_proj.weight: q_rank embed", HAS_BIAS
        ),
        **rms_norm("attn.q_latent_norm", "q_rank <- self_attn.q_a_layernorm.weight: q_rank"),
        **matrix("attn.q_up", queries.format("q_rank", "q_b_proj")),
    }
    return {
        **matrix("attn.q", queries.format("embed", "q_proj"), condition=has_plain_queries),
        **under_condition(query_latent, has_query_latent),
        **linear("attn.kv_down", f"kv_rank embed <- {fused}: (>kv_rank | rope_dim) embed", HAS_BIAS),
        **linear("attn.k_rope", f"rope_dim embed <- {fused}: (kv_rank | >rope_dim) embed", HAS_BIAS),
        **rms_norm("attn.kv_latent_norm", "kv_rank <- self_attn.kv_a_layernorm.weight: kv_rank"),
        **matrix(
            "attn.kv_up", "heads kv_dim kv_rank <- self_attn.kv_b_proj.weight: (heads kv_dim) kv_rank"
        ),
        **linear(
            "attn.o", "embed heads value_dim <- self_attn.o_proj.weight: embed (heads value_dim)", HAS_BIAS
        ),
    }  # fmt: skip


LATENT_LAYER: Parameters = {**PRE_NORMS, **latent_attention()}

# --- The router of DeepSeek-V2

GREEDY = "greedy"
IN_GROUPS = "group_limited_greedy"
# DeepseekV2Config has no default. DeepSeek-V2 has 6.
V2_EXPERTS_PER_TOKEN = 6


def _read_v2_router(config: HFConfig, sizes: Sizes) -> Router:
    """Return the router. Raise PrepError if it normalizes weights or has another method."""
    method = config.get("topk_method", GREEDY)
    if method not in (GREEDY, IN_GROUPS):
        why = f"topk_method of config.json; supported: {GREEDY}, {IN_GROUPS}"
        raise unsupported_config_error(
            f"router method {method!r:.60} is not supported for this family", why
        )
    if config.get("norm_topk_prob"):
        # DeepSeek's own code divides the weights by their sum, and transformers does not.
        why = "config.json has true, which implementations of DeepSeek-V2 treat differently"
        raise unsupported_config_error("`norm_topk_prob` is not supported for this family", why)
    num_groups = 1
    groups_per_token = 1
    if method == IN_GROUPS:
        num_groups = read_size(config, "n_group", 1)
        groups_per_token = read_size(config, "topk_group", 1)
    router = Router(
        is_normalized=False,
        scale=read_positive(config, "routed_scaling_factor", 1.0),
        num_groups=num_groups,
        groups_per_token=groups_per_token,
    )
    num_experts = sizes["experts"]
    router.check_experts(
        num_experts, read_experts_per_token(config, num_experts, V2_EXPERTS_PER_TOKEN)
    )
    return router


# Name in published files, which overrides -> name in SarvamMLAConfig.
SARVAM_MLA_ALIASES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}

# --- Dense models with latent attention


def _read_youtu_std(config: HFConfig, sizes: Sizes) -> float:
    # The default of YoutuConfig.
    return read_positive(config, "initializer_range", 2.0 / (5.0 * sizes["embed"]) ** 0.5)


def _read_youtu_embedding_std(config: HFConfig, sizes: Sizes) -> tuple[tuple[str, float], ...]:
    std = 2.0 * _read_youtu_std(config, sizes)
    return (("embed.tokens", read_positive(config, "embedding_initializer_range", std)),)


def _minicpm_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    return latent_sizes(
        config,
        sizes,
        kv_rank=256,
        q_rank=768,
        key_dim=64,
        value_dim=sizes["embed"] // sizes["heads"],
        rope_dim=32,
    )


def _read_minicpm_depth_scale(config: HFConfig, sizes: Sizes) -> float:
    # A null stands for no factor, an absent field for the factor of MiniCPM3-4B.
    depth = math.sqrt(sizes["layers"])
    return read_positive(config, "scale_depth", depth if "scale_depth" in config else 1.4) / depth


def _read_minicpm_head_scale(config: HFConfig, sizes: Sizes) -> float:
    embed = sizes["embed"]
    base = read_size(config, "dim_model_base", embed if "dim_model_base" in config else 256)
    return base / embed


# --- Experts of DeepSeek-V3 with other attention: GLM-4.5, K-EXAONE, Sarvam, Hunyuan 3

# --- Dense layers, windows and sizes


def _read_exaone_dense_layers(config: HFConfig, layers: int) -> tuple[int, ...]:
    first = first_dense_layers(1)(config, layers)
    return read_dense_layers_by_type(config, layers, default=first)


def _read_dots_windows(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    window = config.get("sliding_window", 4096)
    first = read_count(config, "max_window_layers", 62)
    return read_sliding_windows(config, sizes["layers"], window, lambda layer: layer >= first)


def _glm4_head_dim(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    """Return the width of a head without a number of heads in the config: 128, as in published models.

    Half of the default width in Glm4MoeConfig, 4096 // 96 = 42, is no whole number of pairs to rotate.
    """
    has_width = "num_attention_heads" in config or "head_dim" in config
    return {} if has_width else {"head_dim": 128}


# --- Sarvam

# Name in published files, which overrides -> name in SarvamMoEConfig.
SARVAM_MOE_ALIASES = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "use_qkv_bias": "attention_bias",
}


def _has_sarvam_bias(config: HFConfig) -> bool:
    return bool(with_aliases(config, SARVAM_MOE_ALIASES).get("attention_bias"))


def _sarvam_attention() -> Parameters:
    """Return the parameters of attention, with optional norms of queries and keys."""
    norms = {
        **rms_norm("attn.q_norm", "head_dim <- attention.query_layernorm.weight: head_dim"),
        **rms_norm("attn.k_norm", "head_dim <- attention.key_layernorm.weight: head_dim"),
    }
    return {
        **grouped_qkv("attention.query_key_value", _has_sarvam_bias),
        **matrix("attn.o", "embed heads head_dim <- attention.dense.weight: embed (heads head_dim)"),
        **under_condition(norms, unless_false("use_qk_norm")),
    }  # fmt: skip


FAMILIES = by_name(
    moe_like(
        "deepseek_v2",
        "DeepSeek-V2: latent attention, first dense layers, and experts chosen by softmax scores.",
        layer=LATENT_LAYER,
        moe={**EXPERTS, **shared_experts("mlp.shared_experts")},
        defaults={"vocab": 102_400},
        more_sizes=latent_sizes,
        num_experts=64,
        count_fields=("n_routed_experts",),
        experts_per_token=V2_EXPERTS_PER_TOKEN,
        expert_mlp=1407,
        shared_mlp=shared_count("n_shared_experts", 2),
        dense_layers=first_dense_layers(0),
        rope=partial(_read_latent_rope, positions=2048),
        choices={**LATENT_CHOICES, "rotary_pairs": "interleaved", "router": _read_v2_router},
        ignores=("num_local_experts", "rope_interleave"),
    ),
    deepseek_like(
        "deepseek_v3",
        "DeepSeek-V3: latent attention, first dense layers, and experts chosen by sigmoid scores in groups.",
        layer=LATENT_LAYER,
        # The default 128 of `num_key_value_heads` is the one of `num_attention_heads`. A null means as many.
        defaults={"vocab": 129_280, "embed": 7168, "mlp": 18432, "layers": 61, "heads": 128, "kv_heads": 128},
        more_sizes=latent_sizes,
        num_experts=256,
        experts_per_token=8,
        expert_mlp=2048,
        groups=(8, 4),
        scale=2.5,
        dense_layers=first_dense_layers(3),
        positions=4096,
        rope=partial(_read_latent_rope, positions=4096),
        choices=INTERLEAVED_CHOICES,
        prediction_layers=1,
    ),
    deepseek_like(
        "glm4_moe_lite",
        "GLM-4.7-Flash (`glm4_moe_lite`): the layers of DeepSeek-V3 with dense layers by a list.",
        layer=LATENT_LAYER,
        defaults={"vocab": 154_880, "embed": 2048, "mlp": 10240, "layers": 47, "heads": 20, "kv_heads": 20},
        more_sizes=partial(latent_sizes, q_rank=768, key_dim=192, value_dim=256),
        num_experts=64,
        experts_per_token=4,
        expert_mlp=1536,
        scale=1.8,
        dense_layers=read_listed_or_first_layer,
        positions=202_752,
        rope=partial(_read_latent_rope, positions=202_752),
        norm_eps=1e-5,
        choices=INTERLEAVED_CHOICES,
        check=check_first_dense_layers,
        prediction_layers=1,
    ),
    deepseek_like(
        "sarvam_mla",
        "Sarvam MLA: the layers of DeepSeek-V3 with a router over all experts.",
        # Without `q_lora_rank` there is no latent of queries. DeepSeek-V3 has a default instead.
        layer={**PRE_NORMS, **latent_attention(lambda config: config.get("q_lora_rank") is not None)},
        aliases=SARVAM_MLA_ALIASES,
        defaults={"vocab": 262_144, "mlp": 16384, "heads": 64},
        # Published files have the width of the latent with the rotated elements as `head_dim`.
        more_sizes=partial(latent_sizes, has_head_dim=False),
        num_experts=128,
        experts_per_token=8,
        expert_mlp=2048,
        scale=2.5,
        dense_layers=first_dense_layers(1),
        positions=4096,
        rope=partial(_read_latent_rope, positions=4096, names=("deepseek_yarn",)),
        init_std=0.006,
        choices=INTERLEAVED_CHOICES,
    ),
    llama_like(
        "youtu",
        "Youtu-LLM: LLaMA with the latent attention of DeepSeek-V3.",
        layer={**LATENT_LAYER, **gated_mlp()},
        defaults={"vocab": 128_256, "embed": 2048, "mlp": 6144, "heads": 16, "kv_heads": 16},
        more_sizes=latent_sizes,
        positions=131_072,
        rope=partial(_read_latent_rope, positions=131_072),
        choices={**INTERLEAVED_CHOICES, "init_std": _read_youtu_std, "leaf_init_stds": _read_youtu_embedding_std},
        tied=True,
    ),
    llama_like(
        "minicpm3",
        "MiniCPM3: latent attention with factors for embeddings, outputs of sublayers, and the head's input.",
        layer={**LATENT_LAYER, **gated_mlp(bias=if_set("mlp_bias"))},
        defaults={"vocab": 73448, "embed": 2560, "mlp": 6400, "layers": 62, "heads": 40, "kv_heads": 40},
        more_sizes=_minicpm_sizes,
        positions=32768,
        rope=partial(_read_latent_rope, positions=32768),
        norm_eps=1e-5,
        init_std=0.1,
        choices={
            **LATENT_CHOICES,
            "embed_scale": positive("scale_emb", 12),
            "residual_scale": _read_minicpm_depth_scale,
            "lm_head_input_scale": _read_minicpm_head_scale,
        },
        tied=True,
    ),
    deepseek_like(
        "dots1",
        "dots.llm1: Qwen3's attention with the experts of DeepSeek-V3.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **QK_NORMS},
        defaults={"vocab": 152_064, "embed": 4608, "mlp": 10944, "layers": 62, "kv_heads": 32},
        # Dots1Config has no default for the numbers of experts. dots.llm1 has 128 and 2.
        num_experts=128,
        experts_per_token=6,
        expert_mlp=1408,
        shared_mlp=shared_count("n_shared_experts", 2),
        is_normalized=False,
        dense_layers=first_dense_layers(0),
        choices={"sliding_windows": _read_dots_windows},
        # The class always has norms of queries and keys.
        ignores=("use_qk_norm",),
    ),
    deepseek_like(
        "glm4_moe",
        "GLM-4.5 and later: partly rotated heads, optional norms of queries and keys, DeepSeek-V3's experts.",
        layer={
            **PRE_NORMS,
            **attention(bias=if_set("attention_bias")),
            **under_condition(QK_NORMS, if_set("use_qk_norm")),
        },
        defaults={"vocab": 151_552, "mlp": 10944, "layers": 46, "heads": 96, "kv_heads": 8},
        more_sizes=_glm4_head_dim,
        num_experts=128,
        experts_per_token=8,
        expert_mlp=1408,
        dense_layers=first_dense_layers(1),
        positions=131_072,
        rope=partial_rope(0.5, 131_072),
        norm_eps=1e-5,
        prediction_layers=1,
    ),
    deepseek_like(
        "exaone_moe",
        "K-EXAONE: the windows of EXAONE 4, norms before each sublayer, and the experts of DeepSeek-V3.",
        layer={**PRE_NORMS, **attention(), **QK_NORMS},
        moe={
            **CORRECTED_EXPERTS,
            CORRECTION: correction(
                "mlp.e_score_correction_bias: experts",
                # transformers 5 writes this name.
                alternate="mlp.gate.e_score_correction_bias: experts",
            ),
        },
        defaults={"vocab": 102_400, "mlp": 16384, "kv_heads": 32},
        num_experts=64,
        count_fields=("num_experts",),
        experts_per_token=8,
        expert_mlp=1024,
        shared_mlp=shared_count("num_shared_experts", 1),
        scale=2.5,
        dense_layers=_read_exaone_dense_layers,
        norm_eps=1e-5,
        choices=EXAONE4_WINDOWS,
        # transformers reads the pattern only without `layer_types`.
        ignores=("sliding_window_pattern",),
    ),
    deepseek_like(
        "sarvam_moe",
        "Sarvam MoE: fused queries, keys and values with norms, first dense layers, and DeepSeek-V3's experts.",
        layer={**PRE_NORMS, **_sarvam_attention()},
        moe={**CORRECTED_EXPERTS, CORRECTION: correction("mlp.gate.expert_bias: experts")},
        aliases=SARVAM_MOE_ALIASES,
        defaults={"vocab": 262_144, "mlp": 8192, "layers": 19, "heads": 64, "kv_heads": 4, "head_dim": 64},
        num_experts=128,
        experts_per_token=6,
        expert_mlp=1024,
        scale=2.5,
        dense_layers=first_dense_layers(1),
        positions=131_072,
        rope=partial_rope(1.0, 131_072, 8_000_000.0),
        init_std=0.006,
        tokens="word_embeddings.weight",
    ),
    deepseek_like(
        "solar_open",
        "Solar Open: LLaMA with the experts of DeepSeek-V3 in all layers.",
        layer={**PRE_NORMS, **attention(bias=if_set("attention_bias"))},
        defaults={"vocab": 196_608, "layers": 48, "heads": 64, "kv_heads": 8, "head_dim": 128},
        num_experts=128,
        experts_per_token=8,
        expert_mlp=1280,
        positions=131_072,
        rope_theta=1_000_000.0,
        norm_eps=1e-5,
    ),
    moe_like(
        "hy_v3",
        "Hunyuan 3: Qwen3's attention with the experts of DeepSeek-V3 under other names.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **QK_NORMS},
        moe={
            **experts(router="mlp.router.gate.weight"),
            CORRECTION: correction("mlp.expert_bias: experts", alternate="mlp.e_score_correction_bias: experts"),
            **shared_experts("mlp.shared_mlp"),
        },
        defaults={"vocab": 120_832, "mlp": 13312, "layers": 80, "heads": 64, "kv_heads": 8, "head_dim": 128},
        num_experts=192,
        experts_per_token=8,
        expert_mlp=1536,
        shared_mlp=shared_count("num_shared_experts", 1),
        dense_layers=read_listed_or_first_layer,
        positions=131_072,
        rope_theta=11_158_840.0,
        norm_eps=1e-5,
        init_std=0.006,
        choices={
            "router": lambda config, sizes: Router(
                "sigmoid", scale=read_positive(config, "router_scaling_factor", 2.826), weight_sum_offset=1e-20
            )
        },
        check=check_first_dense_layers,
        # Published files have `qk_norm` and `route_norm`. The class always has both.
        ignores=("use_qk_norm",),
        prediction_layers=1,
    ),
)  # fmt: skip
