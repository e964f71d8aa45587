"""Qwen2 and 2.5: LLaMA with biases on QKV. Upper layers may have a sliding window."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.levanter_layouts import levanter_layouts
from prepcli.models.orbax_layouts import maxtext_layouts, tunix_layout
from prepcli.models.parameters import ALWAYS, HFConfig


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of Qwen2Config."""
    return _llama_style.sizes(config, vocab=151936, mlp=22016, kv_heads=32)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "sliding_window", "layer_types")
    axis_sizes = sizes(config)
    windows = _llama_style.read_upper_layer_windows(config, axis_sizes["layers"])
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=32768), sliding_windows=windows
    )


FAMILY = _llama_style.build_family(
    name="qwen2",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=ALWAYS),
        **_llama_style.gated_mlp(),
    },
    layouts=lambda parameters: {
        **tunix_layout(parameters, qkv_biases=True),
        **maxtext_layouts(parameters, scales_queries=False),
        **levanter_layouts(parameters),
    },
)
