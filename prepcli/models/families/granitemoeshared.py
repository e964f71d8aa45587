"""Granite 3 MoE with shared experts."""

from __future__ import annotations

from prepcli.models.architecture import ArchConfig, reject_unsupported_fields
from prepcli.models.families import _moe_style, granitemoe
from prepcli.models.parameters import HFConfig, read_count
from prepcli.models.rows import Parameters, matrix

SHARED_WIDTH = "shared_intermediate_size"


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GraniteMoeSharedConfig."""
    return {**granitemoe.sizes(config), "shared_mlp": max(1, _read_shared_width(config))}


def _read_shared_width(config: HFConfig) -> int:
    """Return the width of the shared experts, or 0 if there are none."""
    return read_count(config, SHARED_WIDTH, 0)


def _has_shared_experts(config: HFConfig) -> bool:
    return _read_shared_width(config) > 0


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *granitemoe.FIELDS, SHARED_WIDTH)
    sizes(config)
    return granitemoe.moe_arch_config(config)


def shared_experts() -> Parameters:
    """Return the parameters of the shared experts. The gate comes before up in one tensor."""
    gate_up = "shared_mlp embed <- shared_mlp.input_linear.weight: (gate_up={} shared_mlp) embed"
    down = "embed shared_mlp <- shared_mlp.output_linear.weight: embed shared_mlp"
    return {
        **matrix("mlp.shared.gate", gate_up.format(0), condition=_has_shared_experts),
        **matrix("mlp.shared.up", gate_up.format(1), condition=_has_shared_experts),
        **matrix("mlp.shared.down", down, condition=_has_shared_experts),
    }


FAMILY = _moe_style.build_family(
    name="granitemoeshared",
    sizes=sizes,
    arch_config=arch_config,
    layer=granitemoe.LAYER,
    moe={**granitemoe.fused_experts(), **shared_experts()},
)
