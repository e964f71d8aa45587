"""Doge: LLaMA with norms of queries and keys, scores of keys from their values, and weighted residual connections."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import unsupported_config_error
from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    reject_unsupported_fields,
    uniform_windows,
)
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rows import linear, matrix

MAX_POSITIONS = 2048
BIAS = if_set("attention_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of DogeConfig."""
    axis_sizes = _llama_style.sizes(config, vocab=32768, embed=1024, mlp=2048, heads=8)
    return {**axis_sizes, "score_heads": axis_sizes["kv_heads"]}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    # `num_experts` has a default, and no effect without `is_moe`.
    supported_fields = ("attention_bias", "mlp_bias", "num_experts", "sliding_window")
    reject_unsupported_fields(config, *ROPE_FIELDS, *supported_fields)
    if config.get("is_moe"):
        why = "in transformers its router mixes the scores of different tokens"
        raise unsupported_config_error("`is_moe` is not supported for this family", why)
    axis_sizes = sizes(config)
    plain = _llama_style.arch_config(config, axis_sizes, MAX_POSITIONS)
    num_kept = read_size(config, "keep_window_size", 2048)
    if num_kept < plain.max_positions:
        why = f"the model has {plain.max_positions} positions, and drops keys beyond {num_kept}"
        what = f"keep_window_size {num_kept} is not supported for this family"
        raise unsupported_config_error(what, why)
    return dataclasses.replace(
        plain,
        has_key_scores=True,
        sliding_windows=uniform_windows(axis_sizes["layers"], config.get("sliding_window")),
    )


FAMILY = _llama_style.build_family(
    name="doge",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=BIAS, out_bias=BIAS),
        **_llama_style.QK_NORMS,
        **linear(
            "attn.score_step",
            "score_heads kv_heads head_dim <- self_attn.dt_proj.weight: score_heads (kv_heads head_dim)",
            BIAS,
        ),
        **matrix("attn.score_rate", "score_heads <- self_attn.A: score_heads"),
        **matrix("attn_residual", "embed <- input_residual: embed"),
        **matrix("mlp_residual", "embed <- post_attention_residual: embed"),
        **_llama_style.gated_mlp(bias=if_set("mlp_bias")),
    },
    dropout_fields=DropoutFields(residual=("hidden_dropout", 0.0)),
)
