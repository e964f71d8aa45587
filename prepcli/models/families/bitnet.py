"""BitNet b1.58: LLaMA with norms before the last matrix of attention and of the MLP, and squared ReLU."""

from __future__ import annotations

from prepcli.core.errors import invalid_config_error
from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set
from prepcli.models.rows import rms_norm

BIAS = if_set("attention_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of BitNetConfig."""
    return _llama_style.sizes(
        config, vocab=128256, embed=2560, mlp=6912, layers=30, heads=20, kv_heads=5
    )


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias")
    axis_sizes = sizes(config)
    width = axis_sizes["heads"] * axis_sizes["head_dim"]
    if width != axis_sizes["embed"]:
        why = f"the norm of {width} elements of heads has the hidden_size, {axis_sizes['embed']}"
        raise invalid_config_error(why)
    return _llama_style.arch_config(
        config,
        axis_sizes,
        max_positions=2048,
        rope_theta=500_000.0,
        activation=("hidden_act", "relu2"),
        norm_eps=("rms_norm_eps", 1e-5),
    )


FAMILY = _llama_style.build_family(
    name="bitnet",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=BIAS, out_bias=BIAS),
        **rms_norm(
            "attn.o_norm", "heads head_dim <- self_attn.attn_sub_norm.weight: (heads head_dim)"
        ),
        **_llama_style.gated_mlp(),
        **rms_norm("mlp.down_norm", "mlp <- mlp.ffn_sub_norm.weight: mlp"),
    },
)
