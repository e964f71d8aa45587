"""Mixtral: Mistral with a sparse MoE of a few large experts."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
    uniform_windows,
)
from prepcli.models.families import _llama_style
from prepcli.models.levanter_layouts import levanter_layouts
from prepcli.models.orbax_layouts import maxtext_layouts
from prepcli.models.parameters import HFConfig, read_size


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of MixtralConfig."""
    # transformers uses `num_experts` if a config has both names.
    experts = read_size(config, "num_experts", read_size(config, "num_local_experts", 8))
    return {**_llama_style.sizes(config, mlp=14336, kv_heads=8), "experts": experts, "gate_up": 2}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *ROPE_FIELDS, "sliding_window", "layer_types", "num_local_experts", "num_experts"
    )
    axis_sizes = sizes(config)
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=131072, rope_theta=1e6),
        norm_eps=read_positive(config, "rms_norm_eps", 1e-5),
        # MixtralConfig has no window by default, unlike MistralConfig with 4096.
        sliding_windows=uniform_windows(axis_sizes["layers"], config.get("sliding_window")),
        experts_per_token=_llama_style.read_experts_per_token(
            config, axis_sizes["experts"], default=2
        ),
    )


FAMILY = _llama_style.build_family(
    name="mixtral",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(),
        **_llama_style.experts(
            # An expert is w2(silu(w1 x) * w3 x), so that w3 is the up projection.
            gate="block_sparse_moe.experts.{experts}.w1.weight",
            up="block_sparse_moe.experts.{experts}.w3.weight",
            down="block_sparse_moe.experts.{experts}.w2.weight",
            router="block_sparse_moe.gate.weight",
        ),
    },
    layouts=lambda parameters: {
        **maxtext_layouts(parameters, scales_queries=True, experts_module="MoeBlock_0"),
        **levanter_layouts(parameters),
    },
)
