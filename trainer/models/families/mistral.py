"""Mistral: LLaMA with a window."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import ROPE, Traits, only_knows, same_window
from trainer.models.families import _llama_style
from trainer.models.layouts import hf_flax
from trainer.models.parameters import Config


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; MistralConfig's defaults where a field is absent."""
    return _llama_style.sizes(config, mlp=14336, kv_heads=8)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else. A window that is null is none."""
    only_knows(config, *ROPE, "sliding_window", "layer_types")
    found = sizes(config)
    windows = same_window(found["layers"], config.get("sliding_window", 4096))
    return dataclasses.replace(_llama_style.traits(config, found, positions=131072), windows=windows)


FAMILY = _llama_style.family(
    name="mistral",
    sizes=sizes,
    traits=traits,
    tied=False,
    layer={**_llama_style.NORMS, **_llama_style.attention(), **_llama_style.gated()},
    layouts=lambda table: hf_flax(table, _llama_style.PREFIX, norm="weight"),
)
