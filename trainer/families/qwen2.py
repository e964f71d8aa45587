"""Qwen2 and 2.5: LLaMA with biases on queries, keys and values; upper layers may have a window."""

from __future__ import annotations

import dataclasses

from trainer import llama_like
from trainer.table import Config
from trainer.traits import ROPE, Traits, only_knows


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; Qwen2Config's defaults where a field is absent."""
    return llama_like.sizes(config, vocab=151936, mlp=22016, kv_heads=32)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, *ROPE, "sliding_window", "layer_types")
    found = sizes(config)
    windows = llama_like.upper_windows(config, found["layers"])
    return dataclasses.replace(llama_like.traits(config, found, positions=32768), windows=windows)


FAMILY = llama_like.family(
    name="qwen2",
    sizes=sizes,
    traits=traits,
    tied=False,
    layer={
        **llama_like.NORMS,
        **llama_like.attention(bias=""),
        **llama_like.gated(),
    },
)
