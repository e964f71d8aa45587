"""Granite MoE with sliding windows in three of four layers, attention sinks, and a rotary base per layer."""

from __future__ import annotations

from prepcli.models.architecture import ArchConfig, reject_unsupported_fields
from prepcli.models.families import _moe_style, granite_swa, granitemoe, granitemoeshared
from prepcli.models.parameters import HFConfig


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *granitemoe.FIELDS, *granite_swa.WINDOW_FIELDS, granitemoeshared.SHARED_WIDTH
    )
    axis_sizes = granitemoeshared.sizes(config)
    return granite_swa.with_windows_and_sinks(
        granitemoe.moe_arch_config(config), config, axis_sizes, max_positions=2048
    )


FAMILY = _moe_style.build_family(
    name="granitemoe_swa",
    sizes=granitemoeshared.sizes,
    arch_config=arch_config,
    layer={**granitemoe.LAYER, **granite_swa.SINKS},
    moe={
        **granitemoe.fused_experts("experts.gate_up_proj", "experts.down_proj", "router.weight"),
        **granitemoeshared.shared_experts(),
    },
)
