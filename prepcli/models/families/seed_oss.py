"""Seed-OSS: LLaMA with biases for queries, keys and values."""

from __future__ import annotations

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set
from prepcli.models.rows import unless_false


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of SeedOssConfig."""
    return _llama_style.sizes(
        config, vocab=155136, mlp=27648, layers=64, heads=80, kv_heads=8, head_dim=128
    )


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "mlp_bias")
    return _llama_style.arch_config(config, sizes(config), max_positions=524288)


FAMILY = _llama_style.build_family(
    name="seed_oss",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(
            bias=unless_false("attention_bias"), out_bias=if_set("attention_out_bias")
        ),
        **_llama_style.gated_mlp(bias=if_set("mlp_bias")),
    },
    dropout_fields=DropoutFields(
        attention=("attention_dropout", 0.1), residual=("residual_dropout", 0.1)
    ),
)
