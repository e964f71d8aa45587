"""Mistral: LLaMA with a window."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields, uniform_windows
from trainer.models.families import _llama_style
from trainer.models.layouts import hf_flax_layout
from trainer.models.parameters import HFConfig


def sizes(config: HFConfig) -> dict[str, int]:
    """Atom -> extent; MistralConfig's defaults where a field is absent."""
    return _llama_style.sizes(config, mlp=14336, kv_heads=8)


def arch_config(config: HFConfig) -> ArchConfig:
    """What its layers compute; PrepError where the config asks for something else. A window that is null is none."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "sliding_window", "layer_types")
    found = sizes(config)
    windows = uniform_windows(found["layers"], config.get("sliding_window", 4096))
    return dataclasses.replace(_llama_style.arch_config(config, found, max_positions=131072), sliding_windows=windows)


FAMILY = _llama_style.build_family(
    name="mistral",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={**_llama_style.PRE_NORMS, **_llama_style.attention(), **_llama_style.gated_mlp()},
    layouts=lambda table: hf_flax_layout(table, _llama_style.TENSOR_PREFIX, norm_name="weight"),
)
