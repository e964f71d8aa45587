"""Granite 4: Mamba-2 in most layers, attention in some, experts in all layers or in none, and Granite's factors."""

from __future__ import annotations

import dataclasses

from prepcli.algebra.axis_map import ATTENTION_LAYERS, MIXER_LAYERS
from prepcli.core.errors import unsupported_config_error
from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import (
    _grouped_style,
    _hybrid_style,
    _llama_style,
    bamba,
    granite,
)
from prepcli.models.families._grouped_style import LayerGroup
from prepcli.models.families._hybrid_style import FULL, LINEAR, layers_of_type
from prepcli.models.families._moe_style import fused_experts
from prepcli.models.field_aliases import AliasedConfig
from prepcli.models.parameters import HFConfig, if_set, read_count, read_size
from prepcli.models.rows import Parameters, matrix

ALIASES = {"layers_block_type": "layer_types"}
FIELDS = (
    *ROPE_FIELDS,
    *granite.MULTIPLIERS,
    *("attention_bias", "num_local_experts", "layer_types", "shared_intermediate_size"),
)


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GraniteMoeHybridConfig."""
    axis_sizes = _llama_style.sizes(config)
    shared_mlp = read_size(config, "shared_intermediate_size", 1024)
    return {
        **axis_sizes,
        **bamba.mixer_sizes(config, axis_sizes["embed"]),
        "mlp": axis_sizes["mlp"] if _has_experts(config) else shared_mlp,
        "shared_mlp": shared_mlp,
        "experts": max(1, _read_num_experts(config)),
        "gate_up": 2,
    }


def _read_num_experts(config: HFConfig) -> int:
    """Return the number of experts, or 0 if the MLPs are dense."""
    return read_count(config, "num_local_experts", 8)


def _has_experts(config: HFConfig) -> bool:
    return _read_num_experts(config) > 0


def layer_types(config: HFConfig) -> tuple[str, ...]:
    """Return the type of each layer. By default all layers have Mamba-2."""
    return _hybrid_style.read_layer_types(
        AliasedConfig(config, ALIASES),
        read_size(config, "num_hidden_layers", 32),
        (FULL, LINEAR),
        lambda layer: LINEAR,
    )


def attention_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with attention."""
    return layers_of_type(layer_types(config), FULL)


def mixer_layers(config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with Mamba-2."""
    return layers_of_type(layer_types(config), LINEAR)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *FIELDS)
    axis_sizes = sizes(config)
    layers = mixer_layers(config)
    has_rotation = config.get("position_embedding_type") == "rope"
    if not layers and not has_rotation:
        what = "layers without Mamba-2 and without rotation are not supported"
        why = "all layers have full_attention, and position_embedding_type is not rope"
        raise unsupported_config_error(what, why)
    arch = dataclasses.replace(
        granite.scaled_arch_config(config, axis_sizes),
        mixer=_hybrid_style.read_mamba2(config) if layers else None,
        mixer_layers=layers,
    )
    if not has_rotation:
        arch = dataclasses.replace(arch, rope=None)
    if not _has_experts(config):
        return arch
    experts_per_token = _llama_style.read_experts_per_token(
        config, axis_sizes["experts"], default=2
    )
    return dataclasses.replace(arch, experts_per_token=experts_per_token)


def _shared_mlp(path: str, atom: str) -> Parameters:
    """Return the parameters of the MLP of every layer. A layer with experts has both.

    Args:
        path: Path in the tree.
        atom: Atom of the hidden units.
    """
    gate_up = f"{atom} embed <- shared_mlp.input_linear.weight: (gate_up={{}} {atom}) embed"
    down = f"embed {atom} <- shared_mlp.output_linear.weight: embed {atom}"
    return {
        **matrix(f"{path}.gate", gate_up.format(0)),
        **matrix(f"{path}.up", gate_up.format(1)),
        **matrix(f"{path}.down", down),
    }


def _mlp() -> Parameters:
    """Return the parameters of the experts with the shared MLP, or of the shared MLP alone."""
    # The gate of the experts and the gate of the dense MLP have one path, so one is the other's `else_row`.
    shared = _shared_mlp("mlp.shared", "shared_mlp")
    experts = _grouped_style.under_condition({**fused_experts(), **shared}, _has_experts)
    for path, dense in _shared_mlp("mlp", "mlp").items():
        experts[path] = dataclasses.replace(experts[path], else_row=dense.row)
    return experts


FAMILY = _grouped_style.build_family(
    name="granitemoehybrid",
    sizes=sizes,
    arch_config=arch_config,
    layer={**_llama_style.PRE_NORMS, **_mlp()},
    groups={
        ATTENTION_LAYERS: LayerGroup(
            _llama_style.attention(
                bias=if_set("attention_bias"), out_bias=if_set("attention_bias")
            ),
            attention_layers,
        ),
        MIXER_LAYERS: LayerGroup(bamba.MIXER, mixer_layers),
    },
)
