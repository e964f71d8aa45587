"""GLM-4 of 2024 (`glm`): LLaMA that rotates neighbouring elements in half of each head, with gate and up fused."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig
from prepcli.models.rows import unless_false

MAX_POSITIONS = 131072
HAS_QKV_BIAS = unless_false("attention_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GlmConfig."""
    axis_sizes = _llama_style.sizes(
        config, vocab=151552, mlp=13696, layers=40, kv_heads=2, head_dim=128
    )
    return {**axis_sizes, "gate_up": 2}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "partial_rotary_factor")
    axis_sizes = sizes(config)
    rope = _llama_style.read_partial_rope(
        config, axis_sizes["head_dim"], default_share=0.5, max_positions=MAX_POSITIONS
    )
    return dataclasses.replace(
        _llama_style.arch_config(
            config, axis_sizes, MAX_POSITIONS, rope=rope, norm_eps=("rms_norm_eps", 1.5625e-7)
        ),
        rotary_pairs="interleaved",
    )


FAMILY = _llama_style.build_family(
    name="glm",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=HAS_QKV_BIAS),
        **_llama_style.FUSED_GATED_MLP,
    },
)
