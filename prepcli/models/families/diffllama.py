"""DiffLlama: LLaMA with differential attention, the difference of the attentions of two heads."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.architecture import (
    LAMBDA_VECTORS,
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set
from prepcli.models.rows import Parameters, matrix

BIAS = if_set("attention_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of DiffLlamaConfig."""
    return _llama_style.sizes(config, embed=2048, mlp=8192, layers=16)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias")
    axis_sizes = sizes(config)
    kv_heads = axis_sizes["kv_heads"]
    if kv_heads % 2:
        why = f"num_key_value_heads is {kv_heads}, and differential attention needs pairs of them"
        raise invalid_config_error(why)
    # Transformers refuses it too.
    if config.get("attention_dropout"):
        why = "differential attention has no dropout of probabilities"
        raise unsupported_config_error("`attention_dropout` is not supported for this family", why)
    lambda_std = read_positive(config, "lambda_std_dev", 0.1)
    return dataclasses.replace(
        _llama_style.arch_config(
            config, axis_sizes, max_positions=2048, norm_eps=("rms_norm_eps", 1e-5)
        ),
        has_differential_attention=True,
        leaf_init_stds=tuple((f"attn.{name}.weight", lambda_std) for name in LAMBDA_VECTORS),
    )


def _lambdas() -> Parameters:
    """Return the four vectors of a layer that give the factor of the second attention."""
    parameters: Parameters = {}
    for name in LAMBDA_VECTORS:
        parameters |= matrix(f"attn.{name}", f"head_dim <- self_attn.{name}: head_dim")
    return parameters


FAMILY = _llama_style.build_family(
    name="diffllama",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=BIAS, out_bias=BIAS),
        **_lambdas(),
        **_llama_style.gated_mlp(),
    },
    dropout_fields=DropoutFields(attention=None),
)
