"""Hunyuan V1 MoE: Hunyuan V1 with a sparse MoE and shared experts."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import unsupported_config_error
from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style, _moe_style, hunyuan_v1_dense
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rows import rms_norm

HAS_BIAS = if_set("attention_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of HunYuanMoEV1Config."""
    axis_sizes = _llama_style.sizes(config, vocab=290943)
    # transformers uses `num_local_experts` if a config has both names.
    experts = read_size(config, "num_local_experts", read_size(config, "num_experts", 1))
    return {**axis_sizes, "shared_mlp": axis_sizes["mlp"], "experts": experts, "gate_up": 2}


def _read_experts_per_token(config: HFConfig, experts: int) -> int:
    """Return the number of experts per token, which a config may list for each layer.

    Raises:
        PrepError: The layers have different numbers, or a number is invalid.
    """
    # transformers uses `num_experts_per_tok` if a config has both names.
    count = config.get("num_experts_per_tok", config.get("moe_topk", 1))
    if isinstance(count, list) and count:
        if any(other != count[0] for other in count):
            why = f"moe_topk is {count!r:.80}; layers have the same number of experts per token"
            raise unsupported_config_error("experts per token by layer are not supported", why)
        count = count[0]
    return _llama_style.read_experts_per_token({"num_experts_per_tok": count}, experts, default=1)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    # Published files have `use_qk_norm`. The class always has the norms.
    moe_fields = ("num_experts", "num_local_experts", "use_qk_norm")
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", *moe_fields)
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _llama_style.arch_config(
            hunyuan_v1_dense.with_static_rope(config, axis_sizes["head_dim"]),
            axis_sizes,
            max_positions=2048,
            norm_eps=("rms_norm_eps", 1e-5),
        ),
        rotates_before_qk_norm=True,
        experts_per_token=_read_experts_per_token(config, axis_sizes["experts"]),
    )


FAMILY = _moe_style.build_family(
    name="hunyuan_v1_moe",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
        **rms_norm("attn.q_norm", "head_dim <- self_attn.query_layernorm.weight: head_dim"),
        **rms_norm("attn.k_norm", "head_dim <- self_attn.key_layernorm.weight: head_dim"),
    },
    moe={
        **_llama_style.experts(
            gate="mlp.experts.{experts}.gate_proj.weight",
            up="mlp.experts.{experts}.up_proj.weight",
            down="mlp.experts.{experts}.down_proj.weight",
            router="mlp.gate.wg.weight",
        ),
        **_moe_style.shared_experts("mlp.shared_mlp"),
    },
)
