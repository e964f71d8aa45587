"""InternLM 3: LLaMA with wide heads and optional biases on all matrices."""

from __future__ import annotations

from prepcli.core.errors import unsupported_config_error
from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of InternLM3Config."""
    return _llama_style.sizes(config, vocab=128512, mlp=10240, layers=48, kv_heads=2, head_dim=128)


def _has_attention_bias(config: HFConfig) -> bool:
    # Published files have the first name. It is used if a config has both.
    return bool(config.get("qkv_bias", config.get("attention_bias", False)))


def _has_mlp_bias(config: HFConfig) -> bool:
    return bool(config.get("bias", config.get("mlp_bias", False)))


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "mlp_bias", "qkv_bias")
    if _has_attention_bias(config) != _has_mlp_bias(config):
        why = "attention and MLP of transformers' class have biases together or not at all"
        raise unsupported_config_error("`qkv_bias` without `bias` is not supported", why)
    return _llama_style.arch_config(
        config, sizes(config), max_positions=32768, norm_eps=("rms_norm_eps", 1e-5)
    )


FAMILY = _llama_style.build_family(
    name="internlm3",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=_has_attention_bias, out_bias=_has_attention_bias),
        **_llama_style.gated_mlp(bias=_has_mlp_bias),
    },
)
