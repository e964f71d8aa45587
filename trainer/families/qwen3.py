"""Qwen3: LLaMA with a norm of each query and key, and large heads; upper layers may have a window."""

from __future__ import annotations

import dataclasses

from trainer import llama_like
from trainer.table import Config, Family
from trainer.traits import Traits, only_knows


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; Qwen3Config's defaults where a field is absent."""
    return llama_like.sizes(config, vocab=151936, mlp=22016, kv_heads=32, head_dim=128)


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, "attention_bias", "sliding_window", "layer_types")
    found = sizes(config)
    windows = llama_like.upper_windows(config, found["layers"])
    return dataclasses.replace(llama_like.traits(config, found, positions=32768), windows=windows)


FAMILY = Family(
    name="qwen3",
    prefix=llama_like.PREFIX,
    unprefixed=llama_like.UNPREFIXED,
    sizes=sizes,
    table={
        **llama_like.EMBEDDING,
        **llama_like.NORMS,
        **llama_like.attention(bias="attention_bias", out_bias="attention_bias"),
        **llama_like.HEAD_NORMS,
        **llama_like.gated(),
        **llama_like.END,
    },
    dropped=llama_like.OLD_BUFFERS,
    tie=llama_like.tie(default=False),
    traits=traits,
)
