"""Families with DeepSeek-V3's experts and other attention: GLM-4.5, K-EXAONE, Sarvam, Hunyuan 3. No I/O, no jax."""

from __future__ import annotations

from prepcli.models.architecture import read_positive, read_sliding_windows
from prepcli.models.declaration import AliasedConfig, Sizes, by_name, under_condition
from prepcli.models.families._llama_style import (
    BIASED_ATTENTION,
    PRE_NORMS,
    QK_NORMS,
    attention,
    partial_rope,
    read_max_window_layers,
)
from prepcli.models.families._moe_style import (
    CORRECTED_EXPERTS,
    CORRECTION,
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
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rope_config import Rope, read_rope
from prepcli.models.rows import Parameters, linear, matrix, rms_norm, unless_false

# --- Dense layers, windows and sizes


def _read_exaone_dense_layers(config: HFConfig, layers: int) -> tuple[int, ...]:
    first = first_dense_layers(1)(config, layers)
    return read_dense_layers_by_type(config, layers, default=first)


def _read_dots_windows(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    window = config.get("sliding_window", 4096)
    first = read_max_window_layers(config, default=62)
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
SARVAM_QKV = "head_dim embed <- attention.query_key_value.weight"


def _has_sarvam_bias(config: HFConfig) -> bool:
    return bool(AliasedConfig(config, SARVAM_MOE_ALIASES).get("attention_bias"))


def _read_sarvam_rope(config: HFConfig, sizes: Sizes) -> Rope:
    return read_rope(
        config,
        sizes["head_dim"],
        max_positions=read_size(config, "max_position_embeddings", 131_072),
        default_theta=8_000_000.0,
        allow_partial=True,
    )


def _sarvam_attention() -> Parameters:
    """Return the parameters of attention. One tensor has all queries, then all keys, then all values."""
    # With 4 heads and 2 kv_heads of 8 elements, rows 0 to 31 are queries, 32 to 47 keys, and 48 to 63 values.
    q = "(>heads head_dim | kv_heads head_dim | kv_heads head_dim)"
    k = "(heads head_dim | >kv_heads head_dim | kv_heads head_dim)"
    v = "(heads head_dim | kv_heads head_dim | >kv_heads head_dim)"
    norms = {
        **rms_norm("attn.q_norm", "head_dim <- attention.query_layernorm.weight: head_dim"),
        **rms_norm("attn.k_norm", "head_dim <- attention.key_layernorm.weight: head_dim"),
    }
    return {
        **linear("attn.q", f"heads {SARVAM_QKV}: {q} embed", _has_sarvam_bias),
        **linear("attn.k", f"kv_heads {SARVAM_QKV}: {k} embed", _has_sarvam_bias),
        **linear("attn.v", f"kv_heads {SARVAM_QKV}: {v} embed", _has_sarvam_bias),
        **matrix("attn.o", "embed heads head_dim <- attention.dense.weight: embed (heads head_dim)"),
        **under_condition(norms, unless_false("use_qk_norm")),
    }  # fmt: skip


FAMILIES = by_name(
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
        defaults={
            "vocab": 262_144,
            "mlp": 8192,
            "layers": 19,
            "heads": 64,
            "kv_heads": 4,
            "head_dim": 64,
        },
        num_experts=128,
        experts_per_token=6,
        expert_mlp=1024,
        scale=2.5,
        dense_layers=first_dense_layers(1),
        positions=131_072,
        rope=_read_sarvam_rope,
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
            CORRECTION: correction(
                "mlp.expert_bias: experts", alternate="mlp.e_score_correction_bias: experts"
            ),
            **shared_experts("mlp.shared_mlp"),
        },
        defaults={
            "vocab": 120_832,
            "mlp": 13312,
            "layers": 80,
            "heads": 64,
            "kv_heads": 8,
            "head_dim": 128,
        },
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
                "sigmoid",
                scale=read_positive(config, "router_scaling_factor", 2.826),
                weight_sum_offset=1e-20,
            ),
        },
        check=check_first_dense_layers,
        # Published files have `qk_norm` and `route_norm`. The class always has both.
        ignores=("use_qk_norm",),
        prediction_layers=1,
    ),
)
