"""Granite with sliding windows in three of four layers, attention sinks, and a rotary base per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.architecture import (
    FULL_ATTENTION,
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    read_sliding_windows,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style, granite
from prepcli.models.parameters import HFConfig, Parameter, if_set, read_size
from prepcli.models.rope_config import Rope, read_rope, read_scaling

HAS_BIAS = if_set("attention_bias")
WINDOW_FIELDS = ("layer_types", "layer_rope_theta", "sliding_window")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GraniteSWAConfig."""
    return _llama_style.sizes(
        config, vocab=100352, embed=2560, mlp=8192, layers=24, heads=20, kv_heads=4
    )


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *ROPE_FIELDS, *granite.MULTIPLIERS, *WINDOW_FIELDS, "attention_bias", "mlp_bias"
    )
    axis_sizes = sizes(config)
    scaled = granite.scaled_arch_config(config, axis_sizes)
    return dataclasses.replace(
        with_windows_and_sinks(scaled, config, axis_sizes, max_positions=8192),
        norm_eps=read_positive(config, "rms_norm_eps", 1e-5),
    )


def with_windows_and_sinks(
    arch_config: ArchConfig, config: HFConfig, axis_sizes: Mapping[str, int], max_positions: int
) -> ArchConfig:
    """Return an architecture with the windows, the sinks and the rotary bases of a config.

    Args:
        arch_config: The architecture without them.
        config: Content of a config.json.
        axis_sizes: Size of each named axis (atom), e.g. `{"embed": 768}`.
        max_positions: Default of `max_position_embeddings`.

    Raises:
        PrepError: A field is invalid, or layers of one type have different bases.
    """
    windows = read_sliding_windows(
        config,
        axis_sizes["layers"],
        config.get("sliding_window", 128),
        lambda layer: layer % 4 != 0,
    )
    max_positions = read_size(config, "max_position_embeddings", max_positions)
    head_dim = axis_sizes["head_dim"]
    rope = read_rope(config, head_dim, max_positions=max_positions)
    thetas = _read_thetas(config, axis_sizes["layers"], rope.theta)
    # A base of 0 stands for a layer without rotation.
    bases = {
        is_full: {
            theta
            for theta, window in zip(thetas, windows)
            if theta and (window == FULL_ATTENTION) == is_full
        }
        for is_full in (True, False)
    }
    if any(len(found) > 1 for found in bases.values()):
        why = f"layer_rope_theta is {thetas!r:.80}"
        raise unsupported_config_error(
            "different rotary bases in layers of one type are not supported", why
        )

    def rope_of(is_full: bool) -> Rope:
        (theta,) = bases[is_full] or bases[not is_full] or {rope.theta}
        return _rope_with_base(config, theta, head_dim, max_positions)

    return dataclasses.replace(
        arch_config,
        max_positions=max_positions,
        rope=rope_of(True),
        local_rope=rope_of(False),
        layers_without_rope=tuple(layer for layer, theta in enumerate(thetas) if not theta),
        sliding_windows=windows,
        has_attention_sinks=True,
    )


def _read_thetas(config: HFConfig, layers: int, default: float) -> list[float]:
    """Return the rotary base of each layer, 0 for a layer without rotation.

    Raises:
        PrepError: The list has another length or values below 0.
    """
    listed = config.get("layer_rope_theta")
    if listed is None:
        return [default] * layers
    thetas: list[float] = []
    if isinstance(listed, list):
        thetas = [theta for theta in listed if isinstance(theta, int | float) and theta >= 0]
    if not isinstance(listed, list) or not len(thetas) == len(listed) == layers:
        why = f"layer_rope_theta is {listed!r:.80}, it must give {layers} numbers from 0 on"
        raise invalid_config_error(why)
    return thetas


def _rope_with_base(config: HFConfig, theta: float, head_dim: int, max_positions: int) -> Rope:
    """Return the rotary embedding of the config with another base."""
    with_base: HFConfig = {
        **config,
        "rope_scaling": None,
        "rope_parameters": {**read_scaling(config), "rope_theta": theta},
    }
    return read_rope(with_base, head_dim, max_positions=max_positions)


SINKS = {"attn.sinks.bias": Parameter("heads <- self_attn.sinks: heads")}
FAMILY = _llama_style.build_family(
    name="granite_swa",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=True,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
        **SINKS,
        **_llama_style.gated_mlp(bias=if_set("mlp_bias")),
    },
)
