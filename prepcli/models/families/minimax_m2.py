"""MiniMax-M2: norms over all queries and keys, partial rotation, and experts chosen by corrected sigmoid scores."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style, _moe_style
from prepcli.models.moe_config import Router
from prepcli.models.parameters import HFConfig, Parameter, read_size
from prepcli.models.rope_config import check_rotary_dim
from prepcli.models.rows import Parameters

MAX_POSITIONS = 196608
DEFAULT_THETA = 5e6


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of MiniMaxM2Config."""
    axis_sizes = _llama_style.sizes(
        config,
        vocab=200064,
        embed=3072,
        mlp=1536,
        layers=62,
        heads=48,
        kv_heads=8,
        head_dim=128,
    )
    # transformers uses `num_experts` if a config has both names.
    experts = read_size(config, "num_experts", read_size(config, "num_local_experts", 256))
    return {**axis_sizes, "experts": experts, "gate_up": 2}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    # Published files have `use_qk_norm`. The class always has the norms.
    reject_unsupported_fields(
        config,
        *ROPE_FIELDS,
        *("partial_rotary_factor", "num_local_experts", "num_experts", "use_qk_norm"),
    )
    axis_sizes = sizes(config)
    head_dim = axis_sizes["head_dim"]
    # Published files have the number of rotated elements.
    rotary_dim = check_rotary_dim(read_size(config, "rotary_dim", head_dim), head_dim, "rotary_dim")
    rope = _llama_style.read_partial_rope(
        config,
        head_dim,
        default_share=rotary_dim / head_dim,
        max_positions=MAX_POSITIONS,
        default_theta=DEFAULT_THETA,
    )
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=MAX_POSITIONS, rope=rope),
        qk_norm_axes="all_heads",
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=8
        ),
        router=Router("sigmoid"),
    )


CORRECTION: Parameters = {
    "mlp.router.correction.bias": Parameter(
        "experts <- block_sparse_moe.e_score_correction_bias: experts",
        alternate="experts <- mlp.e_score_correction_bias: experts",
    )
}
FAMILY = _moe_style.build_family(
    name="minimax_m2",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(),
        **_llama_style.ALL_HEADS_QK_NORMS,
    },
    moe={
        **_llama_style.experts(
            # An expert is w2(silu(w1 x) * w3 x), as in Mixtral.
            gate="block_sparse_moe.experts.{experts}.w1.weight",
            up="block_sparse_moe.experts.{experts}.w3.weight",
            down="block_sparse_moe.experts.{experts}.w2.weight",
            router="block_sparse_moe.gate.weight",
        ),
        **CORRECTION,
    },
)
