"""GPT-NeoX and Pythia: parallel or sequential blocks, partial rotary embedding, QKV fused per head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _gpt_style
from prepcli.models.parameters import HFConfig
from prepcli.models.rope_config import Rope, read_rope
from prepcli.models.rows import (
    build_family,
    embedding,
    fused_qkv,
    layer_norm,
    linear,
    matrix,
    stack,
    unless_false,
)

FIELD_NAMES = {"mlp": "intermediate_size"}
HAS_BIAS = unless_false("attention_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GPTNeoXConfig."""
    return _gpt_style.sizes(
        config, vocab=50432, positions=2048, embed=6144, layers=44, heads=64, mlp=24576, field_names=FIELD_NAMES
    )  # fmt: skip


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported.

    `rotary_pct` and `rotary_emb_base` override `partial_rotary_factor` and `rope_theta`, which
    transformers 4.57 writes as well.
    """
    reject_unsupported_fields(
        config,
        *ROPE_FIELDS,
        "attention_bias",
        "use_parallel_residual",
        "rotary_pct",
        "partial_rotary_factor",
    )
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _gpt_style.arch_config(config, axis_sizes, activation=("hidden_act", "gelu")),
        norm_eps=read_positive(config, "layer_norm_eps", 1e-5),
        block_type="parallel" if config.get("use_parallel_residual", True) else "pre",
        rope=read_neox_rope(config, axis_sizes, default_share=0.25),
    )


def read_neox_rope(
    config: HFConfig, axis_sizes: Mapping[str, int], *, default_share: float
) -> Rope:
    """Read the rotary embedding from the fields of GPT-NeoX.

    Args:
        config: Content of a config.json.
        axis_sizes: Size of each named axis (atom).
        default_share: Share of a head that rotates if the config has no `rotary_pct`.
    """
    rotary = {
        "partial_rotary_factor": config.get("rotary_pct", default_share),
        "rope_theta": config.get("rotary_emb_base", 1e4),
    }
    return read_rope(
        {**config, **rotary},
        axis_sizes["head_dim"],
        max_positions=axis_sizes["positions"],
        allow_partial=True,
    )


PARAMETERS = {
    **embedding("tokens", "vocab embed <- embed_in.weight: vocab embed"),
    **stack("layers", "layers.{layers}", {
        **layer_norm("attn_norm", "embed <- input_layernorm.weight: embed"),
        # The rows of a head are together. With heads of 4 elements, rows 0 to 3 are the queries of
        # head 0, 4 to 7 its keys, 8 to 11 its values, and row 12 begins head 1.
        **fused_qkv("attention.query_key_value", "(heads qkv={} head_dim) embed", HAS_BIAS),
        **linear("attn.o", "embed heads head_dim <- attention.dense.weight: embed (heads head_dim)", HAS_BIAS),
        **layer_norm("mlp_norm", "embed <- post_attention_layernorm.weight: embed"),
        **linear("mlp.up", "mlp embed <- mlp.dense_h_to_4h.weight: mlp embed"),
        **linear("mlp.down", "embed mlp <- mlp.dense_4h_to_h.weight: embed mlp"),
    }),
    **layer_norm("final_norm", "embed <- final_layer_norm.weight: embed"),
    **matrix(
        "head",
        "vocab embed <- embed_out.weight: vocab embed",
        # The head is `embed_out` in transformers 4 and `lm_head` in transformers 5.
        alternate="vocab embed <- lm_head.weight: vocab embed",
    ),
}  # fmt: skip
LEGACY_BUFFERS = {
    **_gpt_style.mask_buffers("layers.{i}.attention"),
    "layers.{i}.attention.rotary_emb.inv_freq": "rotary frequencies, computed from the config",
}
FAMILY = build_family(
    name="gpt_neox",
    prefix="gpt_neox.",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    tied_by_default=False,
    dropped=LEGACY_BUFFERS,
    dropout_fields=DropoutFields(
        residual=("hidden_dropout", 0.0), embedding=("hidden_dropout", 0.0)
    ),
)
