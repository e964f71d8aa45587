"""EXAONE 4: LLaMA with norms after attention and MLP, QK norms, and rotation in sliding layers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from prepcli.core.errors import invalid_config_error
from prepcli.models.architecture import (
    FULL_ATTENTION,
    ROPE_FIELDS,
    ArchConfig,
    is_in_window_pattern,
    read_sliding_windows,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Exaone4Config."""
    return _llama_style.sizes(config, vocab=102400, mlp=16384, kv_heads=32)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *ROPE_FIELDS, "layer_types", "sliding_window", "sliding_window_pattern"
    )
    return dataclasses.replace(
        windowed_arch_config(config, sizes(config)),
        block_type="output_norm",
    )


def windowed_arch_config(config: HFConfig, axis_sizes: Mapping[str, int]) -> ArchConfig:
    """Return the architecture of LLaMA with windows and rotation in most layers, and neither in the others.

    Args:
        config: Content of a config.json.
        axis_sizes: Size of each named axis (atom), e.g. `{"embed": 768}`.
    """
    layers = axis_sizes["layers"]
    window = config.get("sliding_window", 4096)
    windows = read_sliding_windows(
        config, layers, window, lambda layer: _has_window(config, layer, layers)
    )
    # A model without any window rotates in all layers.
    full_layers: list[int] = []
    if window is not None:
        full_layers = [layer for layer, width in enumerate(windows) if width == FULL_ATTENTION]
    return dataclasses.replace(
        _llama_style.arch_config(
            config, axis_sizes, max_positions=2048, norm_eps=("rms_norm_eps", 1e-5)
        ),
        sliding_windows=windows,
        layers_without_rope=tuple(full_layers),
    )


def _has_window(config: HFConfig, layer: int, layers: int) -> bool:
    """Return whether a layer has a sliding window, by a pattern of letters or a number.

    The letters L (local) and G (global) repeat, and the last layer is always global: Exaone4Config, and
    `check_is_sliding` of the code that was published with the models.
    """
    pattern = config.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        return is_in_window_pattern(config, layer, default=4)
    if not pattern or set(pattern) - set("LG"):
        why = f"sliding_window_pattern is {pattern!r:.60}, it must be letters L and G"
        raise invalid_config_error(why)
    return layer != layers - 1 and pattern[layer % len(pattern)] == "L"


FAMILY = _llama_style.build_family(
    name="exaone4",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.OUTPUT_NORMS,
        **_llama_style.attention(),
        **_llama_style.QK_NORMS,
        **_llama_style.gated_mlp(),
    },
)
