"""BLOOM: GPT-NeoX's blocks with ALiBi instead of rotation, and a norm of the embeddings."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import unsupported_config_error
from prepcli.models.architecture import ArchConfig, reject_unsupported_fields
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _gpt_style
from prepcli.models.layouts import hf_flax_layout
from prepcli.models.parameters import HFConfig
from prepcli.models.position_bias import Alibi, alibi_slopes
from prepcli.models.rows import (
    build_family,
    embedding,
    fused_qkv,
    layer_norm,
    linear,
    matrix,
    stack,
)

# The config has no number of positions: ALiBi needs none. Training used this length.
PRETRAINING_LENGTH = 2048


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of BloomConfig."""
    _gpt_style.check_n_embed(config)
    # No field sets the width of the MLP. Old configs have `n_inner`, which transformers ignores too.
    return _gpt_style.sizes(
        config,
        vocab=250880,
        positions=PRETRAINING_LENGTH,
        embed=64,
        layers=2,
        heads=8,
        field_names={"embed": "n_embed", "layers": "n_layer", "heads": "n_head"},
    )


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config)
    if config.get("apply_residual_connection_post_layernorm"):
        why = "the residual connections of this model start after the norms"
        raise unsupported_config_error(
            "`apply_residual_connection_post_layernorm` is not supported for this family", why
        )
    axis_sizes = sizes(config)
    return dataclasses.replace(
        # No field sets the activation: it is the tanh form of GELU.
        _gpt_style.arch_config(config, axis_sizes, activation="gelu_new"),
        score_bias=Alibi(alibi_slopes(axis_sizes["heads"])),
    )


PARAMETERS = {
    **embedding("tokens", "vocab embed <- word_embeddings.weight: vocab embed"),
    **layer_norm("embed_norm", "embed <- word_embeddings_layernorm.weight: embed"),
    **stack("layers", "h.{layers}", {
        **layer_norm("attn_norm", "embed <- input_layernorm.weight: embed"),
        **fused_qkv("self_attention.query_key_value", "(heads qkv={} head_dim) embed"),
        **linear("attn.o", "embed heads head_dim <- self_attention.dense.weight: embed (heads head_dim)"),
        **layer_norm("mlp_norm", "embed <- post_attention_layernorm.weight: embed"),
        **linear("mlp.up", "mlp embed <- mlp.dense_h_to_4h.weight: mlp embed"),
        **linear("mlp.down", "embed mlp <- mlp.dense_4h_to_h.weight: embed mlp"),
    }),
    **layer_norm("final_norm", "embed <- ln_f.weight: embed"),
    **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
}  # fmt: skip
LAYOUTS = hf_flax_layout(PARAMETERS, prefix="transformer.", allows_tied_head=True)
FAMILY = build_family(
    name="bloom",
    prefix="transformer.",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    tied_by_default=True,
    dropped={},
    layouts=LAYOUTS,
    dropout_fields=DropoutFields(residual=("hidden_dropout", 0.0)),
)
