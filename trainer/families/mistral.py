"""Mistral: LLaMA with a window."""

from __future__ import annotations

import dataclasses

from trainer import llama_like
from trainer.layouts import hf_flax
from trainer.table import Config
from trainer.traits import ROPE, Traits, only_knows, same_window


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; MistralConfig's defaults where a field is absent."""
    return llama_like.sizes(config, mlp=14336, kv_heads=8)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else. A window that is null is none."""
    only_knows(config, *ROPE, "sliding_window", "layer_types")
    found = sizes(config)
    windows = same_window(found["layers"], config.get("sliding_window", 4096))
    return dataclasses.replace(llama_like.traits(config, found, positions=131072), windows=windows)


FAMILY = llama_like.family(
    name="mistral",
    sizes=sizes,
    traits=traits,
    tied=False,
    layer={**llama_like.NORMS, **llama_like.attention(), **llama_like.gated()},
    layouts=lambda table: hf_flax(table, llama_like.PREFIX, norm="weight"),
)
