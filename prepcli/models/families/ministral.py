"""Ministral: Mistral with sliding windows in some layers."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_sliding_windows,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style, mistral
from prepcli.models.parameters import HFConfig


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported.

    Without `layer_types` each layer has the sliding window.
    """
    reject_unsupported_fields(config, *ROPE_FIELDS, "sliding_window", "layer_types")
    axis_sizes = mistral.sizes(config)
    windows = read_sliding_windows(
        config, axis_sizes["layers"], config.get("sliding_window", 4096), lambda layer: True
    )
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=131072), sliding_windows=windows
    )


FAMILY = _llama_style.build_family(
    name="ministral",
    sizes=mistral.sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={**_llama_style.PRE_NORMS, **_llama_style.attention(), **_llama_style.gated_mlp()},
)
