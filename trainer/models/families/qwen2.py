"""Qwen2 and 2.5: LLaMA with biases on queries, keys and values; upper layers may have a window."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import ROPE, Traits, only_knows
from trainer.models.families import _llama_style
from trainer.models.parameters import Config


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; Qwen2Config's defaults where a field is absent."""
    return _llama_style.sizes(config, vocab=151936, mlp=22016, kv_heads=32)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, *ROPE, "sliding_window", "layer_types")
    found = sizes(config)
    windows = _llama_style.upper_windows(config, found["layers"])
    return dataclasses.replace(_llama_style.traits(config, found, positions=32768), windows=windows)


FAMILY = _llama_style.family(
    name="qwen2",
    sizes=sizes,
    traits=traits,
    tied=False,
    layer={
        **_llama_style.NORMS,
        **_llama_style.attention(bias=""),
        **_llama_style.gated(),
    },
)
