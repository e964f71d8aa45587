"""Granite 3 MoE: Granite with a sparse MoE whose experts are fused into one tensor per matrix."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style, _moe_style, granite
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rows import Parameters, matrix

HAS_BIAS = if_set("attention_bias")
FIELDS = (*ROPE_FIELDS, *granite.MULTIPLIERS, "attention_bias", "num_local_experts")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GraniteMoeConfig."""
    experts = read_size(config, "num_local_experts", 8)
    return {**_llama_style.sizes(config), "experts": experts, "gate_up": 2}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *FIELDS)
    return moe_arch_config(config)


def moe_arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture of Granite with experts. Unsupported fields of the config are not checked here."""
    return dataclasses.replace(
        granite.scaled_arch_config(config, sizes(config)),
        experts_per_token=_llama_style.read_experts_per_token(
            config, sizes(config)["experts"], default=2
        ),
    )


def fused_experts(
    gate_up: str = "input_linear.weight",
    down: str = "output_linear.weight",
    router: str = "router.layer.weight",
) -> Parameters:
    """Return the parameters of the experts and the router. The gate comes before up.

    Args:
        gate_up: Tensor of all gate and up matrices.
        down: Tensor of all down matrices.
        router: Tensor of the router.
    """
    row = f"experts mlp embed <- block_sparse_moe.{gate_up}: experts (gate_up={{}} mlp) embed"
    return {
        **matrix("mlp.router", f"experts embed <- block_sparse_moe.{router}: experts embed"),
        **matrix("mlp.gate", row.format(0)),
        **matrix("mlp.up", row.format(1)),
        **matrix("mlp.down", f"experts embed mlp <- block_sparse_moe.{down}: experts embed mlp"),
    }


LAYER: Parameters = {
    **_llama_style.PRE_NORMS,
    **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
}
FAMILY = _moe_style.build_family(
    name="granitemoe",
    sizes=sizes,
    arch_config=arch_config,
    layer=LAYER,
    moe=fused_experts(),
)
