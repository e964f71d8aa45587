"""MPT: ALiBi, layer norms without biases, no biases elsewhere, and optional bounds of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.architecture import (
    FULL_ATTENTION,
    NO_CLIP,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _gpt_style
from prepcli.models.parameters import HFConfig
from prepcli.models.position_bias import Alibi, alibi_slopes
from prepcli.models.rows import build_family, embedding, matrix, rms_norm, stack

# Field -> values that transformers computes. It ignores other values, which change the model.
FIXED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "expansion_ratio": (4,),
    "no_bias": (True,),
    "embedding_fraction": (1, None),
    "norm_type": ("low_precision_layernorm", "layernorm", None),
}
FIXED_ATTENTION_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False, None),
    "qk_ln": (False, None),
    "attn_uses_sequence_id": (False, None),
}


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of MptConfig."""
    return _gpt_style.sizes(
        config,
        vocab=50368,
        positions=2048,
        embed=2048,
        layers=24,
        heads=16,
        field_names={
            **{"embed": "d_model", "layers": "n_layers", "heads": "n_heads"},
            **{"positions": "max_seq_len", "mlp": "mlp_width"},
        },
    )


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config)
    axis_sizes = sizes(config)
    attention = config.get("attn_config")
    if attention is None:
        attention = {}
    if not isinstance(attention, Mapping):
        raise invalid_config_error(f"attn_config is {attention!r:.60}, it must be an object")
    _check_fixed_fields(config, FIXED_FIELDS)
    _check_fixed_fields(attention, FIXED_ATTENTION_FIELDS)
    clip = NO_CLIP
    if attention.get("clip_qkv"):
        clip = read_positive(attention, "clip_qkv", NO_CLIP)
    return ArchConfig(
        norm="layer",
        norm_eps=read_positive(config, "layer_norm_epsilon", 1e-5),
        activation="gelu",
        has_gated_mlp=False,
        attn_scale=read_positive(attention, "softmax_scale", axis_sizes["head_dim"] ** -0.5),
        sliding_windows=(FULL_ATTENTION,) * axis_sizes["layers"],
        rope=None,
        score_bias=Alibi(alibi_slopes(axis_sizes["heads"])),
        qkv_clip=clip,
        max_positions=axis_sizes["positions"],
        init_std=read_positive(config, "initializer_range", 0.02),
    )


def _check_fixed_fields(fields: HFConfig, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise PrepError if a field has a value that changes what the model computes."""
    for name, values in allowed.items():
        if name in fields and fields[name] not in values:
            why = f"config.json has {fields[name]!r:.60}, which changes what the model computes"
            raise unsupported_config_error(f"`{name}` is not supported for this family", why)


QKV = "heads head_dim embed <- attn.Wqkv.weight: (qkv={} heads head_dim) embed"
PARAMETERS = {
    **embedding("tokens", "vocab embed <- wte.weight: vocab embed"),
    **stack("layers", "blocks.{layers}", {
        # Layer norms without a bias have the rows of RMS norms.
        **rms_norm("attn_norm", "embed <- norm_1.weight: embed"),
        **matrix("attn.q", QKV.format(0)),
        **matrix("attn.k", QKV.format(1)),
        **matrix("attn.v", QKV.format(2)),
        **matrix("attn.o", "embed heads head_dim <- attn.out_proj.weight: embed (heads head_dim)"),
        **rms_norm("mlp_norm", "embed <- norm_2.weight: embed"),
        **matrix("mlp.up", "mlp embed <- ffn.up_proj.weight: mlp embed"),
        **matrix("mlp.down", "embed mlp <- ffn.down_proj.weight: embed mlp"),
    }),
    **rms_norm("final_norm", "embed <- norm_f.weight: embed"),
    **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
}  # fmt: skip
FAMILY = build_family(
    name="mpt",
    prefix="transformer.",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    tied_by_default=True,
    dropped={},
    # The config has the dropout rates inside `attn_config`, not as top-level fields.
    dropout_fields=DropoutFields(attention=None),
)
