"""EXAONE 4: LLaMA with norms after attention and MLP, QK norms, and rotation in sliding layers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from trainer.models.architecture import (
    FULL_ATTENTION,
    ROPE_FIELDS,
    ArchConfig,
    read_sliding_windows,
    reject_unsupported_fields,
)
from trainer.models.families import _llama_style
from trainer.models.parameters import HFConfig, read_size


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
    pattern = read_size(config, "sliding_window_pattern", 4)
    window = config.get("sliding_window", 4096)
    windows = read_sliding_windows(
        config, axis_sizes["layers"], window, lambda layer: (layer + 1) % pattern != 0
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
