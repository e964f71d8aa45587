"""Qwen3: LLaMA with a norm of each query and key, and large heads; upper layers may have a window."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import ROPE, Traits, only_knows
from trainer.models.families import _llama_style
from trainer.models.parameters import Config


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; Qwen3Config's defaults where a field is absent."""
    return _llama_style.sizes(config, vocab=151936, mlp=22016, kv_heads=32, head_dim=128)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, *ROPE, "attention_bias", "sliding_window", "layer_types")
    found = sizes(config)
    windows = _llama_style.upper_windows(config, found["layers"])
    return dataclasses.replace(_llama_style.traits(config, found, positions=32768), windows=windows)


FAMILY = _llama_style.family(
    name="qwen3",
    sizes=sizes,
    traits=traits,
    tied=False,
    layer={
        **_llama_style.NORMS,
        **_llama_style.attention(bias="attention_bias", out_bias="attention_bias"),
        **_llama_style.HEAD_NORMS,
        **_llama_style.gated(),
    },
)
