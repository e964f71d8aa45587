"""LLaMA and its nearest kin: RMS norms before attention and MLP, rotary embedding, a gated MLP. No I/O, no jax."""

from __future__ import annotations

import dataclasses
from typing import Any

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.core.json_values import HFConfig, JsonObject
from prepcli.models.architecture import (
    read_positive,
    read_sliding_windows,
)
from prepcli.models.declaration import (
    Sizes,
    by_name,
    changed,
    plain_mlp,
    unless_false,
)
from prepcli.models.families._llama_style import (
    BIASED_ATTENTION,
    BIASED_MLP,
    LEGACY_BUFFERS,
    PRE_NORMS,
    QK_NORMS,
    attention,
    gated_mlp,
    heads_that_fill_width,
    llama_like,
    read_layers_without_rope,
    read_qwen_window,
    rope_reader,
    uniform_window,
    windows,
)
from prepcli.models.layer_config import DropoutFields
from prepcli.models.parameters import ALWAYS, if_set, read_count, read_size
from prepcli.models.rope_config import QueryScale, Rope, read_rope


def half_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    """Return the sizes of halves. A rotated pair is `half` apart in Hugging Face files, adjacent in EasyLM trees."""
    return {"two": 2, "half": sizes["head_dim"] // 2}


# --- Windows, and layers without rotation


def _upper_windows(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    """Return the windows of Qwen: layers from `max_window_layers` on slide if `use_sliding_window` is true."""
    window = read_qwen_window(config)
    # The default of Qwen2Config and Qwen3Config.
    first = read_count(config, "max_window_layers", 28)
    return read_sliding_windows(config, sizes["layers"], window, lambda layer: layer >= first)


def _smollm3_windows(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    unrotated = read_layers_without_rope(config, sizes)
    window = config.get("sliding_window")
    if config.get("layer_types") is None and not config.get("use_sliding_window"):
        window = None
    return read_sliding_windows(config, sizes["layers"], window, lambda layer: layer in unrotated)


# --- Rotary embeddings with defaults of their own

CWM_ROPE: JsonObject = {
    "rope_theta": 1_000_000.0, "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
MINISTRAL3_ROPE: JsonObject = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _read_ministral3_rope(config: HFConfig, sizes: Sizes) -> Rope:
    """Read the rotary embedding with the factor of queries."""
    scaling: Any = config.get("rope_scaling") or config.get("rope_parameters")
    if scaling is None:
        scaling = MINISTRAL3_ROPE
    if not isinstance(scaling, dict):
        raise invalid_config_error(f"its rope scaling is {scaling!r:.60}, it must be an object")
    for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        if scaling.get(key) is None:
            raise invalid_config_error(
                f"its rope scaling has no {key}, which the factor of queries needs"
            )
    rope = read_rope(
        changed(config, rope_scaling=None, rope_parameters=scaling),
        sizes["head_dim"],
        max_positions=read_size(config, "max_position_embeddings", 262_144),
    )
    step_length = read_size(scaling, "original_max_position_embeddings", 16384)
    if rope.rope_type in ("llama3", "yarn", "longrope"):
        # For these types a field of the config itself comes before that of its scaling.
        step_length = rope.original_max_positions
    query_scale = QueryScale(
        beta=read_positive(scaling, "llama_4_scaling_beta", 0.1), step_length=step_length
    )
    return dataclasses.replace(rope, query_scale=query_scale)


# --- Biases of InternLM 3


def _has_attention_bias(config: HFConfig) -> bool:
    # Published files have the first name. It is used if a config has both.
    return bool(config.get("qkv_bias", config.get("attention_bias", False)))


def _has_mlp_bias(config: HFConfig) -> bool:
    return bool(config.get("bias", config.get("mlp_bias", False)))


def _check_biases_together(config: HFConfig, sizes: Sizes) -> None:
    if _has_attention_bias(config) != _has_mlp_bias(config):
        why = "attention and MLP of transformers' class have biases together or not at all"
        raise unsupported_config_error("`qkv_bias` without `bias` is not supported", why)


FAMILIES = by_name(
    llama_like(
        "llama",
        "LLaMA 1, 2, 3, 3.1 and 3.2: rotary embedding, grouped-query attention, gated MLP.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **BIASED_MLP},
        more_sizes=half_sizes,
        dropped={**LEGACY_BUFFERS, "rope.freqs": "rotary frequencies of Meta's files, computed from the config"},
    ),
    llama_like(
        "mistral",
        "Mistral: LLaMA with a sliding window.",
        layer={**PRE_NORMS, **attention(), **gated_mlp()},
        defaults={"mlp": 14336, "kv_heads": 8},
        positions=131_072,
        choices=uniform_window(4096),
        ignores=("layer_types",),
    ),
    llama_like(
        "ministral",
        "Ministral: Mistral with sliding windows in some layers.",
        layer={**PRE_NORMS, **attention(), **gated_mlp()},
        defaults={"mlp": 14336, "kv_heads": 8},
        positions=131_072,
        choices={"sliding_windows": windows(4096, lambda layer: True)},
    ),
    llama_like(
        "ministral3",
        "Ministral 3: Mistral with YaRN and a factor of queries that grows with the position.",
        layer={**PRE_NORMS, **attention(), **gated_mlp()},
        defaults={"vocab": 131_072, "mlp": 14336, "layers": 34, "kv_heads": 8, "head_dim": 128},
        positions=262_144,
        rope=_read_ministral3_rope,
        norm_eps=1e-5,
        choices=uniform_window(None),
        ignores=("layer_types",),
    ),
    llama_like(
        "qwen2",
        "Qwen2 and 2.5: LLaMA with biases on QKV. Upper layers may have a sliding window.",
        layer={**PRE_NORMS, **attention(bias=ALWAYS), **gated_mlp()},
        defaults={"vocab": 151_936, "mlp": 22016, "kv_heads": 32},
        positions=32768,
        choices={"sliding_windows": _upper_windows},
    ),
    llama_like(
        "qwen3",
        "Qwen3: LLaMA with QK norms and a separate head width. Upper layers may have a sliding window.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **QK_NORMS, **gated_mlp()},
        defaults={"vocab": 151_936, "mlp": 22016, "kv_heads": 32, "head_dim": 128},
        positions=32768,
        choices={"sliding_windows": _upper_windows},
        ignores=("use_qk_norm",),
    ),
    llama_like(
        "smollm3",
        "SmolLM3: LLaMA with layers whose queries and keys do not rotate, by default every fourth one.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **BIASED_MLP},
        defaults={"vocab": 128_256, "embed": 2048, "layers": 36, "heads": 16, "kv_heads": 4},
        positions=32768,
        rope_theta=2_000_000.0,
        choices={
            "layers_without_rope": read_layers_without_rope,
            "sliding_windows": _smollm3_windows,
        },
        tied=True,
    ),
    llama_like(
        "seed_oss",
        "Seed-OSS: LLaMA with biases for queries, keys and values.",
        layer={
            **PRE_NORMS,
            **attention(bias=unless_false("attention_bias"), out_bias=if_set("attention_out_bias")),
            **BIASED_MLP,
        },
        defaults={"vocab": 155_136, "mlp": 27648, "layers": 64, "heads": 80, "kv_heads": 8, "head_dim": 128},
        positions=524_288,
        dropout_fields=DropoutFields(attention=("attention_dropout", 0.1), residual=("residual_dropout", 0.1)),
    ),
    llama_like(
        "arcee",
        "Arcee AFM: LLaMA with an MLP of two matrices and squared ReLU.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **plain_mlp(bias=if_set("mlp_bias"))},
        defaults={"embed": 2560, "mlp": 18432},
        positions=4096,
        activation="relu2",
        norm_eps=1e-5,
        choices={"has_gated_mlp": False},
    ),
    llama_like(
        "helium",
        "Helium: LLaMA that rotates neighbouring elements.",
        layer={**PRE_NORMS, **attention(bias=if_set("attention_bias")), **BIASED_MLP},
        defaults={
            "vocab": 48000,
            "embed": 2560,
            "mlp": 7040,
            "layers": 24,
            "heads": 20,
            "kv_heads": 20,
            "head_dim": 128,
        },
        more_sizes=heads_that_fill_width,
        positions=4096,
        rope_theta=100_000.0,
        norm_eps=1e-8,
        choices={"rotary_pairs": "interleaved"},
    ),
    llama_like(
        "internlm3",
        "InternLM 3: LLaMA with wide heads and optional biases on all matrices.",
        layer={
            **PRE_NORMS,
            **attention(bias=_has_attention_bias, out_bias=_has_attention_bias),
            **gated_mlp(bias=_has_mlp_bias),
        },
        defaults={"vocab": 128_512, "mlp": 10240, "layers": 48, "kv_heads": 2, "head_dim": 128},
        positions=32768,
        norm_eps=1e-5,
        check=_check_biases_together,
    ),
    llama_like(
        "ernie4_5",
        "ERNIE 4.5 (dense): LLaMA that rotates neighbouring elements, with a tied head.",
        layer={
            **PRE_NORMS,
            **attention(bias=if_set("use_bias"), out_bias=if_set("use_bias")),
            **gated_mlp(bias=if_set("use_bias")),
        },
        defaults={
            "vocab": 103_424,
            "embed": 1024,
            "mlp": 3072,
            "layers": 18,
            "heads": 16,
            "kv_heads": 2,
            "head_dim": 128,
        },
        positions=131_072,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        choices={"rotary_pairs": "interleaved"},
        tied=True,
    ),
    llama_like(
        "iquestcoder",
        "IQuest-Coder: LLaMA with wide heads.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **BIASED_MLP},
        defaults={
            "vocab": 76800,
            "embed": 5120,
            "mlp": 27648,
            "layers": 80,
            "heads": 40,
            "kv_heads": 8,
            "head_dim": 128,
        },
        positions=131_072,
        norm_eps=1e-5,
    ),
    llama_like(
        "cwm",
        "CWM: Llama 3 with a sliding window in three of four layers.",
        layer={**PRE_NORMS, **attention(), **BIASED_MLP},
        defaults={
            "vocab": 128_256,
            "embed": 6144,
            "mlp": 21504,
            "layers": 64,
            "heads": 48,
            "kv_heads": 8,
            "head_dim": 128,
        },
        positions=131_072,
        rope=rope_reader(131_072, 1_000_000.0, CWM_ROPE),
        norm_eps=1e-5,
        choices={"sliding_windows": windows(8192, lambda layer: layer % 4 != 0)},
    ),
)  # fmt: skip
