"""K-EXAONE: the windows of EXAONE 4, norms before each sublayer, and the experts of DeepSeek-V3."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _deepseek_style, _llama_style, _moe_style, exaone4
from prepcli.models.parameters import MAX_LAYERS, HFConfig, Parameter, read_size
from prepcli.models.rows import Parameters


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of ExaoneMoeConfig."""
    axis_sizes = exaone4.sizes(config)
    return {
        **axis_sizes,
        **_deepseek_style.expert_sizes(
            config,
            axis_sizes,
            dense_layers(config),
            width=1024,
            experts=read_size(config, "num_experts", 64),
            shared=read_size(config, "num_shared_experts", 1),
        ),
    }


def dense_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with a dense MLP."""
    layers = read_size(config, "num_hidden_layers", 32, MAX_LAYERS)
    first = _deepseek_style.first_dense_layers(config, layers=32, default=1)
    return _moe_style.read_dense_layers_by_type(config, layers, default=first)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    windows = ("layer_types", "sliding_window", "sliding_window_pattern")
    reject_unsupported_fields(
        config,
        *ROPE_FIELDS,
        *windows,
        *("first_k_dense_replace", "num_experts", "num_shared_experts", "routed_scaling_factor"),
    )
    axis_sizes = sizes(config)
    experts_per_token = _llama_style.read_experts_per_token(
        config, axis_sizes["experts"], default=8
    )
    return dataclasses.replace(
        exaone4.windowed_arch_config(config, axis_sizes),
        experts_per_token=experts_per_token,
        router=_deepseek_style.grouped_router(
            config, axis_sizes["experts"], experts_per_token, groups=(1, 1), scale=2.5
        ),
        dense_layers=dense_layers(config),
    )


CORRECTION: Parameters = {
    "mlp.router.correction.bias": Parameter(
        "experts <- mlp.e_score_correction_bias: experts",
        # transformers 5 writes this name.
        alternate="experts <- mlp.gate.e_score_correction_bias: experts",
    )
}
FAMILY = _moe_style.build_family(
    name="exaone_moe",
    sizes=sizes,
    arch_config=arch_config,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(),
        **_llama_style.QK_NORMS,
    },
    moe={**_deepseek_style.CORRECTED_EXPERTS, **CORRECTION},
    dense_layers=dense_layers,
)
