"""GPT-OSS: attention with sinks and alternating windows, and experts with biases and a clamped SwiGLU."""

from __future__ import annotations

import dataclasses

from prepcli.core.json_values import JsonObject
from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    read_sliding_windows,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style, _moe_style
from prepcli.models.moe_config import ClampedSwiglu
from prepcli.models.parameters import HFConfig, Parameter, read_size
from prepcli.models.rope_config import read_rope
from prepcli.models.rows import Parameters, linear, matrix, unless_false
from prepcli.models.torchtitan_layouts import torchtitan_gpt_oss_layout

HAS_BIAS = unless_false("attention_bias")
# The rotary embedding of GptOssConfig if the config has none.
DEFAULT_ROPE: JsonObject = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GptOssConfig."""
    axis_sizes = _llama_style.sizes(
        config,
        vocab=201088,
        embed=2880,
        mlp=2880,
        layers=36,
        heads=64,
        kv_heads=8,
        head_dim=64,
    )
    # transformers uses `num_experts` if a config has both names.
    experts = read_size(config, "num_experts", read_size(config, "num_local_experts", 128))
    return {**axis_sizes, "experts": experts, "gate_up": 2}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    fields = ("sliding_window", "layer_types", "num_local_experts", "num_experts", "attention_bias")
    reject_unsupported_fields(config, *ROPE_FIELDS, *fields)
    axis_sizes = sizes(config)
    max_positions = read_size(config, "max_position_embeddings", 131072)
    rope_config = config
    if config.get("rope_parameters") is None:
        rope_config = {**config, "rope_parameters": DEFAULT_ROPE}
    rope = read_rope(
        rope_config,
        axis_sizes["head_dim"],
        max_positions=max_positions,
        default_theta=150_000.0,
    )
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=max_positions, rope=rope),
        norm_eps=read_positive(config, "rms_norm_eps", 1e-5),
        sliding_windows=read_sliding_windows(
            config,
            axis_sizes["layers"],
            config.get("sliding_window", 128),
            lambda layer: layer % 2 == 0,
        ),
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=4
        ),
        clamped_swiglu=ClampedSwiglu(
            alpha=read_positive(config, "swiglu_alpha", 1.702),
            limit=read_positive(config, "swiglu_limit", 7.0),
        ),
        has_attention_sinks=True,
    )


def _experts() -> Parameters:
    """Return the parameters of the experts. Gate and up alternate in the columns of one tensor."""
    # E.g. with mlp 4 column 0 is gate unit 0, column 1 is up unit 0, and column 6 is gate unit 3.
    gate_up = "experts mlp embed <- mlp.experts.gate_up_proj: experts embed (mlp gate_up={})"
    bias = "experts mlp <- mlp.experts.gate_up_proj_bias: experts (mlp gate_up={})"
    down_bias = "experts embed <- mlp.experts.down_proj_bias: experts embed"
    return {
        **linear("mlp.router", "experts embed <- mlp.router.weight: experts embed"),
        **matrix("mlp.gate", gate_up.format(0)),
        "mlp.gate.bias": Parameter(bias.format(0)),
        **matrix("mlp.up", gate_up.format(1)),
        "mlp.up.bias": Parameter(bias.format(1)),
        **matrix("mlp.down", "experts embed mlp <- mlp.experts.down_proj: experts mlp embed"),
        "mlp.down.bias": Parameter(down_bias),
    }


_FAMILY = _moe_style.build_family(
    name="gpt_oss",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
        "attn.sinks.bias": Parameter("heads <- self_attn.sinks: heads"),
    },
    moe=_experts(),
    dropped={},
)
FAMILY = dataclasses.replace(_FAMILY, layouts=torchtitan_gpt_oss_layout(_FAMILY.parameters))
