"""Mistral: LLaMA with a sliding window."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    reject_unsupported_fields,
    uniform_windows,
)
from prepcli.models.families import _llama_style
from prepcli.models.layouts import hf_flax_layout
from prepcli.models.levanter_layouts import levanter_layouts
from prepcli.models.orbax_layouts import maxtext_layouts
from prepcli.models.parameters import HFConfig


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of MistralConfig."""
    return _llama_style.sizes(config, mlp=14336, kv_heads=8)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported.

    A `sliding_window` of null means full attention.
    """
    reject_unsupported_fields(config, *ROPE_FIELDS, "sliding_window", "layer_types")
    axis_sizes = sizes(config)
    # The default of MistralConfig. A null in the config is no default: it turns the window off.
    windows = uniform_windows(axis_sizes["layers"], config.get("sliding_window", 4096))
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=131072), sliding_windows=windows
    )


FAMILY = _llama_style.build_family(
    name="mistral",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={**_llama_style.PRE_NORMS, **_llama_style.attention(), **_llama_style.gated_mlp()},
    layouts=lambda parameters: {
        **hf_flax_layout(parameters, prefix=_llama_style.TENSOR_PREFIX, norm_name="weight"),
        **maxtext_layouts(parameters, scales_queries=True),
        **levanter_layouts(parameters),
    },
)
