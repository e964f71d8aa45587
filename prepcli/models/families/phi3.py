"""Phi-3, 3.5 and 4-mini: LLaMA with fused QKV, and gate and up fused in one matrix."""

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
from prepcli.models.parameters import HFConfig, read_size
from prepcli.models.rope_config import read_rope
from prepcli.models.rows import matrix

QKV = "head_dim embed <- self_attn.qkv_proj.weight"

# "su" and "yarn" are names of longrope in older Phi-3 configs.
ROPE_TYPE_ALIASES = {
    "default": "default",
    "longrope": "longrope",
    "su": "longrope",
    "yarn": "longrope",
}


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Phi3Config."""
    return {**_llama_style.sizes(config, vocab=32064, embed=3072, mlp=8192), "gate_up": 2}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *ROPE_FIELDS, "partial_rotary_factor", "sliding_window", "layer_types"
    )
    axis_sizes = sizes(config)
    max_positions = read_size(config, "max_position_embeddings", 4096)
    original = read_size(config, "original_max_position_embeddings", 4096)
    # Phi3Config keeps the original positions beside `rope_scaling`, not in it, with a default of 4096.
    with_original = {**config, "original_max_position_embeddings": original}
    rope = read_rope(
        with_original,
        axis_sizes["head_dim"],
        max_positions=max_positions,
        # Phi-4-mini rotates three quarters of each head.
        allow_partial=True,
        rope_types=ROPE_TYPE_ALIASES,
    )
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions, rope=rope),
        norm_eps=read_positive(config, "rms_norm_eps", 1e-5),
        sliding_windows=uniform_windows(axis_sizes["layers"], config.get("sliding_window")),
    )


FAMILY = _llama_style.build_family(
    name="phi3",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **matrix(
            # The parts of the tensor have different extents. With 4 heads and 2 kv_heads of 8 elements, rows
            # 0 to 31 are queries, 32 to 47 keys, and 48 to 63 values.
            "attn.q",
            f"heads {QKV}: (>heads head_dim | kv_heads head_dim | kv_heads head_dim) embed",
        ),
        **matrix(
            "attn.k",
            f"kv_heads {QKV}: (heads head_dim | >kv_heads head_dim | kv_heads head_dim) embed",
        ),
        **matrix(
            "attn.v",
            f"kv_heads {QKV}: (heads head_dim | kv_heads head_dim | >kv_heads head_dim) embed",
        ),
        **matrix(
            "attn.o", "embed heads head_dim <- self_attn.o_proj.weight: embed (heads head_dim)"
        ),
        **_llama_style.FUSED_GATED_MLP,
    },
    dropout_fields=DropoutFields(residual=("resid_pdrop", 0.0)),
)
