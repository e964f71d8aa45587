"""Falcon 7B: one head of keys and values, and attention and MLP of one normalized input."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import unsupported_config_error
from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    reject_unsupported_fields,
)
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _gpt_style
from prepcli.models.parameters import HFConfig, if_set
from prepcli.models.rope_config import read_rope
from prepcli.models.rows import (
    build_family,
    embedding,
    layer_norm,
    linear,
    matrix,
    stack,
    unless_false,
)

MAX_POSITIONS = 2048
IS_PARALLEL = unless_false("parallel_attn")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of FalconConfig."""
    _gpt_style.check_n_embed(config)
    axis_sizes = _gpt_style.sizes(
        config,
        vocab=65024,
        positions=MAX_POSITIONS,
        embed=4544,
        layers=32,
        heads=71,
        field_names={"embed": "n_embed", "mlp": "ffn_hidden_size"},
    )
    return {**axis_sizes, "kv_heads": 1}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "multi_query", "parallel_attn")
    if config.get("new_decoder_architecture") or not config.get("multi_query", True):
        why = "only models with one key and value head are supported, such as Falcon 7B"
        raise unsupported_config_error(
            "this form of queries, keys and values is not supported", why
        )
    if IS_PARALLEL(config) and config.get("num_ln_in_parallel_attn") not in (None, 1):
        why = "models with one head of keys and values have one norm before attention and MLP"
        raise unsupported_config_error(
            "`num_ln_in_parallel_attn` is not supported for this family", why
        )
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _gpt_style.arch_config(config, axis_sizes, activation=("activation", "gelu")),
        block_type="parallel_one_norm" if IS_PARALLEL(config) else "pre",
        rope=read_rope(config, axis_sizes["head_dim"], max_positions=axis_sizes["positions"]),
    )


HAS_BIAS = if_set("bias")
QKV = "head_dim embed <- self_attention.query_key_value.weight"


def _has_mlp_norm(config: HFConfig) -> bool:
    return not IS_PARALLEL(config)


PARAMETERS = {
    **embedding("tokens", "vocab embed <- word_embeddings.weight: vocab embed"),
    **stack("layers", "h.{layers}", {
        **layer_norm("attn_norm", "embed <- input_layernorm.weight: embed"),
        **linear(
            "attn.q", f"heads {QKV}: (>heads head_dim | kv_heads head_dim | kv_heads head_dim) embed", HAS_BIAS
        ),
        **linear(
            "attn.k", f"kv_heads {QKV}: (heads head_dim | >kv_heads head_dim | kv_heads head_dim) embed", HAS_BIAS
        ),
        **linear(
            "attn.v", f"kv_heads {QKV}: (heads head_dim | kv_heads head_dim | >kv_heads head_dim) embed", HAS_BIAS
        ),
        **linear("attn.o", "embed heads head_dim <- self_attention.dense.weight: embed (heads head_dim)", HAS_BIAS),
        **layer_norm("mlp_norm", "embed <- post_attention_layernorm.weight: embed", _has_mlp_norm),
        **linear("mlp.up", "mlp embed <- mlp.dense_h_to_4h.weight: mlp embed", HAS_BIAS),
        **linear("mlp.down", "embed mlp <- mlp.dense_4h_to_h.weight: embed mlp", HAS_BIAS),
    }),
    **layer_norm("final_norm", "embed <- ln_f.weight: embed"),
    **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
}  # fmt: skip
FAMILY = build_family(
    name="falcon",
    prefix="transformer.",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    tied_by_default=True,
    dropped={
        "h.{i}.self_attention.rotary_emb.inv_freq": "rotary frequencies, computed from the config"
    },
    dropout_fields=DropoutFields(residual=("hidden_dropout", 0.0)),
)
