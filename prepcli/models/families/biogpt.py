"""BioGPT: OPT's layers with scaled token embeddings and GELU."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ArchConfig, reject_unsupported_fields
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _gpt_style, opt
from prepcli.models.parameters import HFConfig
from prepcli.models.rows import (
    build_family,
    embedding,
    layer_norm,
    matrix,
    stack,
)


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of BioGptConfig."""
    axis_sizes = _gpt_style.sizes(
        config,
        vocab=42384,
        positions=1024,
        embed=1024,
        layers=24,
        heads=16,
        mlp=4096,
        field_names={"mlp": "intermediate_size"},
    )
    return {**axis_sizes, "positions": axis_sizes["positions"] + opt.UNUSED_POSITIONS}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported.

    `layer_norm_eps` has no effect: transformers builds all norms with the default of torch.
    """
    reject_unsupported_fields(config, "scale_embedding")
    axis_sizes = sizes(config)
    embed_scale = axis_sizes["embed"] ** 0.5 if config.get("scale_embedding", True) else 1.0
    return dataclasses.replace(
        _gpt_style.arch_config(config, axis_sizes, activation=("hidden_act", "gelu")),
        norm_eps=opt.NORM_EPS,
        embed_scale=embed_scale,
        max_positions=axis_sizes["positions"] - opt.UNUSED_POSITIONS,
        position_offset=opt.UNUSED_POSITIONS,
    )


PARAMETERS = {
    **embedding("tokens", "vocab embed <- embed_tokens.weight: vocab embed"),
    **embedding("positions", "positions embed <- embed_positions.weight: positions embed"),
    **stack("layers", "layers.{layers}", opt.layer()),
    **layer_norm("final_norm", "embed <- layer_norm.weight: embed"),
    **matrix("head", "vocab embed <- output_projection.weight: vocab embed"),
}  # fmt: skip
FAMILY = build_family(
    name="biogpt",
    prefix="biogpt.",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    tied_by_default=True,
    dropped={},
    dropout_fields=DropoutFields(
        attention=("attention_probs_dropout_prob", 0.1),
        residual=("hidden_dropout_prob", 0.1),
        embedding=("hidden_dropout_prob", 0.1),
    ),
)
