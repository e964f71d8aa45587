"""OPT: learned positions with two unused rows. Pre-norm, or post-norm with narrower embeddings (350M)."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ArchConfig, read_positive, reject_unsupported_fields
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _gpt_style
from prepcli.models.layouts import hf_flax_layout
from prepcli.models.parameters import ALWAYS, Condition, HFConfig, read_size
from prepcli.models.rows import (
    Parameters,
    attention,
    build_family,
    embedding,
    layer_norm,
    linear,
    matrix,
    stack,
    unless_false,
)

# `OPTLearnedPositionalEmbedding` of transformers adds 2 to each position, as fairseq did: its
# positions begin after the padding id, which is 1.
UNUSED_POSITIONS = 2
# The default of torch.nn.LayerNorm. No config field sets it.
NORM_EPS = 1e-5
HAS_PRE_NORM = unless_false("do_layer_norm_before")
HAS_BIAS = unless_false("enable_bias")
HAS_NORM_WEIGHTS = unless_false("layer_norm_elementwise_affine")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of OPTConfig."""
    axis_sizes = _gpt_style.sizes(
        config,
        vocab=50272,
        positions=2048,
        embed=768,
        layers=12,
        heads=12,
        mlp=3072,
        field_names={"mlp": "ffn_dim"},
    )
    return {
        **axis_sizes,
        # E.g. 2048 positions are stored as 2050 rows, and position 0 is row 2.
        "positions": axis_sizes["positions"] + UNUSED_POSITIONS,
        "word_embed": read_size(config, "word_embed_proj_dim", axis_sizes["embed"]),
    }


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config)
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _gpt_style.arch_config(config, axis_sizes, activation=("activation_function", "relu")),
        norm_eps=NORM_EPS,
        block_type="pre" if HAS_PRE_NORM(config) else "post",
        has_final_norm=_has_final_norm(config),
        max_positions=axis_sizes["positions"] - UNUSED_POSITIONS,
        position_offset=UNUSED_POSITIONS,
        init_std=read_positive(config, "init_std", 0.02),
    )


def _has_final_norm(config: HFConfig) -> bool:
    # transformers keeps this field for checkpoints that were fine-tuned before its version 4.20.1.
    return HAS_PRE_NORM(config) and not config.get("_remove_final_layer_norm")


def _final_norm_has_weights(config: HFConfig) -> bool:
    return _has_final_norm(config) and HAS_NORM_WEIGHTS(config)


def _projects_embeddings(config: HFConfig) -> bool:
    axis_sizes = sizes(config)
    return axis_sizes["word_embed"] != axis_sizes["embed"]


def layer(has_bias: Condition = ALWAYS, has_norm_weights: Condition = ALWAYS) -> Parameters:
    """Return the parameters of a layer with the names of fairseq, which BioGPT and XGLM have too.

    Args:
        has_bias: When the projections have biases.
        has_norm_weights: When the norms have parameters.
    """
    return {
        **layer_norm("attn_norm", "embed <- self_attn_layer_norm.weight: embed", has_norm_weights),
        **attention("self_attn.{}_proj", out_name="out", bias=has_bias, out_bias=has_bias),
        **layer_norm("mlp_norm", "embed <- final_layer_norm.weight: embed", has_norm_weights),
        **linear("mlp.up", "mlp embed <- fc1.weight: mlp embed", has_bias),
        **linear("mlp.down", "embed mlp <- fc2.weight: embed mlp", has_bias),
    }


PARAMETERS = {
    **embedding("tokens", "vocab word_embed <- decoder.embed_tokens.weight: vocab word_embed"),
    **embedding("positions", "positions embed <- decoder.embed_positions.weight: positions embed"),
    **matrix(
        "project_in",
        "embed word_embed <- decoder.project_in.weight: embed word_embed",
        condition=_projects_embeddings,
    ),
    **stack("layers", "decoder.layers.{layers}", layer(HAS_BIAS, HAS_NORM_WEIGHTS)),
    **layer_norm("final_norm", "embed <- decoder.final_layer_norm.weight: embed", _final_norm_has_weights),
    **matrix(
        "project_out",
        "word_embed embed <- decoder.project_out.weight: word_embed embed",
        condition=_projects_embeddings,
    ),
    **matrix("head", "vocab word_embed <- lm_head.weight: vocab word_embed"),
}  # fmt: skip
LEGACY_BUFFERS = {"decoder.version": "version of the format"}
LAYOUTS = hf_flax_layout(
    PARAMETERS,
    prefix="model.",
    allows_tied_head=True,
    # The Flax class reads neither field: its tree always has these parameters.
    condition_overrides={HAS_BIAS: True, HAS_NORM_WEIGHTS: True},
)
FAMILY = build_family(
    name="opt",
    prefix="model.",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    tied_by_default=True,
    dropped=LEGACY_BUFFERS,
    layouts=LAYOUTS,
    dropout_fields=DropoutFields(residual=("dropout", 0.1)),
)
