"""EXAONE 3 and 3.5: the layers of LLaMA under the names of GPT-2."""

from __future__ import annotations

from prepcli.models import rows
from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.field_aliases import AliasedConfig
from prepcli.models.parameters import HFConfig, if_set
from prepcli.models.rows import embedding, linear, matrix, rms_norm, stack

HAS_BIAS = if_set("attention_bias")
HAS_MLP_BIAS = if_set("mlp_bias")
# Name in published files, which overrides -> name in ExaoneConfig.
ALIASES = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of ExaoneConfig."""
    return _llama_style.sizes(AliasedConfig(config, ALIASES), vocab=102400, mlp=14336, kv_heads=8)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "mlp_bias")
    return _llama_style.arch_config(
        AliasedConfig(config, ALIASES),
        sizes(config),
        max_positions=4096,
        norm_eps=("rms_norm_eps", 1e-5),
        rope_theta=500_000.0,
    )


LAYER = {
    **_llama_style.rms_norms(attn_norm="ln_1", mlp_norm="ln_2"),
    **rows.separate_qkv("attn.attention.{}_proj", kv_heads="kv_heads", bias=HAS_BIAS),
    **linear(
        "attn.o",
        "embed heads head_dim <- attn.attention.out_proj.weight: embed (heads head_dim)",
        HAS_BIAS,
    ),
    **linear("mlp.gate", "mlp embed <- mlp.c_fc_0.weight: mlp embed", HAS_MLP_BIAS),
    **linear("mlp.up", "mlp embed <- mlp.c_fc_1.weight: mlp embed", HAS_MLP_BIAS),
    **linear("mlp.down", "embed mlp <- mlp.c_proj.weight: embed mlp", HAS_MLP_BIAS),
}
FAMILY = rows.build_family(
    name="exaone",
    prefix="transformer.",
    sizes=sizes,
    arch_config=arch_config,
    parameters={
        **embedding("tokens", "vocab embed <- wte.weight: vocab embed"),
        **stack("layers", "h.{layers}", LAYER),
        **rms_norm("final_norm", "embed <- ln_f.weight: embed"),
        **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
    },
    tied_by_default=False,
    dropped={"rotary.inv_freq": "rotary frequencies, computed from the config"},
)
