"""XGLM: BioGPT's layers with sines and cosines of positions."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.architecture import ArchConfig, read_positive, reject_unsupported_fields
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _gpt_style, opt
from prepcli.models.layouts import hf_flax_layout
from prepcli.models.parameters import HFConfig
from prepcli.models.rows import (
    build_family,
    embedding,
    layer_norm,
    matrix,
    stack,
)


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of XGLMConfig."""
    axis_sizes = _gpt_style.sizes(
        config,
        vocab=256008,
        positions=2048,
        embed=1024,
        layers=24,
        heads=16,
        mlp=4096,
        field_names={
            **{"embed": "d_model", "layers": "num_layers", "heads": "attention_heads"},
            "mlp": "ffn_dim",
        },
    )
    if axis_sizes["embed"] < 4:
        raise invalid_config_error("sinusoidal positions need a d_model of 4 or more")
    return axis_sizes


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, "scale_embedding")
    padding = config.get("pad_token_id", 1)
    if padding not in (None, 0, 1):
        why = f"it is {padding!r:.60}, and transformers gives no embedding to the position of this number"
        raise unsupported_config_error("this `pad_token_id` is not supported for this family", why)
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _gpt_style.arch_config(config, axis_sizes, activation=("activation_function", "gelu")),
        norm_eps=opt.NORM_EPS,
        embed_scale=axis_sizes["embed"] ** 0.5 if config.get("scale_embedding", True) else 1.0,
        has_sinusoidal_positions=True,
        position_offset=opt.UNUSED_POSITIONS,
        init_std=read_positive(config, "init_std", 0.02),
    )


PARAMETERS = {
    **embedding("tokens", "vocab embed <- embed_tokens.weight: vocab embed"),
    **stack("layers", "layers.{layers}", opt.layer()),
    **layer_norm("final_norm", "embed <- layer_norm.weight: embed"),
    **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
}  # fmt: skip
LAYOUTS = hf_flax_layout(PARAMETERS, prefix="model.", allows_tied_head=True)
FAMILY = build_family(
    name="xglm",
    prefix="model.",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    tied_by_default=True,
    dropped={"embed_positions.weights": "sines and cosines, computed from the config"},
    layouts=LAYOUTS,
    dropout_fields=DropoutFields(
        attention=("attention_dropout", 0.1), residual=("dropout", 0.1), embedding=("dropout", 0.1)
    ),
)
