"""StarCoder2: LLaMA's attention between layer norms, an MLP of two matrices, and biases on all matrices."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
    uniform_windows,
)
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig
from prepcli.models.rows import linear, unless_false

HAS_BIAS = unless_false("use_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Starcoder2Config."""
    return _llama_style.sizes(
        config, vocab=49152, embed=3072, mlp=12288, layers=30, heads=24, kv_heads=2
    )


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "sliding_window", "layer_types")
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            axis_sizes,
            max_positions=4096,
            activation=("hidden_act", "gelu_pytorch_tanh"),
            norm_eps=("norm_epsilon", 1e-5),
        ),
        norm="layer",
        has_gated_mlp=False,
        sliding_windows=uniform_windows(axis_sizes["layers"], config.get("sliding_window")),
        init_std=read_positive(config, "initializer_range", 0.018042),
    )


FAMILY = _llama_style.build_family(
    name="starcoder2",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **_llama_style.PRE_LAYER_NORMS,
        **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
        **linear("mlp.up", "mlp embed <- mlp.c_fc.weight: mlp embed", HAS_BIAS),
        **linear("mlp.down", "embed mlp <- mlp.c_proj.weight: embed mlp", HAS_BIAS),
    },
    final_norm=_llama_style.FINAL_LAYER_NORM,
    dropout_fields=DropoutFields(
        residual=("residual_dropout", 0.0), embedding=("embedding_dropout", 0.0)
    ),
)
