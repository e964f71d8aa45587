"""IQuest-Coder: LLaMA with wide heads."""

from __future__ import annotations

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set

HAS_BIAS = if_set("attention_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of IQuestCoderConfig."""
    return _llama_style.sizes(
        config,
        vocab=76800,
        embed=5120,
        mlp=27648,
        layers=80,
        heads=40,
        kv_heads=8,
        head_dim=128,
    )


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "mlp_bias")
    return _llama_style.arch_config(
        config, sizes(config), max_positions=131072, norm_eps=("rms_norm_eps", 1e-5)
    )


FAMILY = _llama_style.build_family(
    name="iquestcoder",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
        **_llama_style.gated_mlp(bias=if_set("mlp_bias")),
    },
)
